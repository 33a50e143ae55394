"""What the endpoints of all APIs share: reading bodies, answering, tracing."""
