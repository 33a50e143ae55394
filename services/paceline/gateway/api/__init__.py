"""Client-facing APIs: HTTP, gRPC and the console."""
