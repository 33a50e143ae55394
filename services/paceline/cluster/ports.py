"""Picks the ports of a fleet on this machine; the question which are free is all it asks of the machine."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack, suppress

from paceline.core.errors import ConfigError

# Free ports are looked for here, below those that systems give to outgoing connections: one of these may take a port
# between this look and the start of the service it is for.
UNCLAIMED = range(10_240, 32_768)
TRIES = 100


class Ports:
    """Hands out ports; each is listened on until all are given, so that none is given twice."""

    def __init__(self, host: str, held: ExitStack) -> None:
        self._host = host
        self._held = held

    def take(self, port: int, flag: str) -> int:
        """Returns the port, or a free one for 0.

        Raises:
            ConfigError: It is in use; names the flag.
        """
        try:
            return self._listen(port) if port else self._take_any()
        except OSError as error:
            raise ConfigError(
                f"{flag} {port}: cannot listen on {self._host} ({error.strerror}); choose another port or 0"
            ) from None

    def _take_any(self) -> int:
        for port in secrets.SystemRandom().sample(UNCLAIMED, TRIES):
            with suppress(OSError):
                return self._listen(port)
        return self._listen(0)

    def _listen(self, port: int) -> int:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        probe = self._held.enter_context(socket.socket(family))
        # Connections of an earlier fleet that linger do not hold the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((self._host, port))
        # A port that is bound only may be bound again.
        probe.listen()
        return int(probe.getsockname()[1])
