"""What endpoints of all APIs stand on: reading bodies, answering, tracing."""
