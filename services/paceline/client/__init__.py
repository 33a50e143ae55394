"""Clients of a gateway: one that streams to a terminal, and one that resumes."""
