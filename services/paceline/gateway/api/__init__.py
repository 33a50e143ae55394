"""What clients meet: the APIs over HTTP, gRPC and the console."""
