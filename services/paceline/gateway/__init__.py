"""The front door: HTTP and gRPC, tokens and text, admission and pairing."""
