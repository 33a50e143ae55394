"""Shared parts of all processes: settings, TLS, gRPC's interceptors and status codes, supervision, start and stop."""
