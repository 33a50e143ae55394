"""What every process has: settings, TLS, gRPC's interceptors and status codes, supervision, start and stop."""
