"""Shared parts of all API endpoints: reading bodies, answering, tracing."""
