"""Ports of this machine: a free one, and whether something listens at one."""

from __future__ import annotations

import socket


def free_port(host: str) -> int:
    """Returns a port that was free a moment ago."""
    family, *_ = socket.getaddrinfo(host, 0)[0]
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def listens(host: str, port: int) -> bool:
    """Tells whether a connection to the address comes about."""
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False
