"""Whether something listens."""

from __future__ import annotations

import socket


def listens(host: str, port: int) -> bool:
    """Tells whether a connection to the address comes about."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False
