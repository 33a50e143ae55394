"""What stands between clients and the gateway, built from its settings: TLS of the doors, and who may come in."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from paceline.core.errors import PacelineError
from paceline.gateway.access.guard import Access
from paceline.gateway.access.keys import KeyRing
from paceline.gateway.access.rate_limit import WindowRateLimit
from paceline.gateway.config import GatewayConfig
from paceline.service.certificates import read_certificates, read_key, utc_now
from paceline.service.supervision import Supervisor

LOOPBACK = ("127.0.0.1", "::1", "localhost")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorTls:
    """What both doors show to clients; no certificate is asked of these."""

    certificate: Path
    key: Path
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Returns the same for the gRPC door."""
        return grpc.ssl_server_credentials([(self.key_pem, self.certificate_pem)])


def load_door_tls(config: GatewayConfig) -> DoorTls | None:
    """Reads `--tls-cert` and `--tls-key`; None without them, which means plain text.

    Raises:
        ConfigError: A file is missing, unreadable, expired, or the two are no pair.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    certificate_pem, certificates = read_certificates("--tls-cert", config.tls_cert, utc_now())
    key_pem = read_key("--tls-key", config.tls_key, certificates[0])
    return DoorTls(certificate=config.tls_cert, key=config.tls_key, certificate_pem=certificate_pem, key_pem=key_pem)


@asynccontextmanager
async def guard(
    config: GatewayConfig, on_refused: Callable[[PacelineError], None], supervisor: Supervisor
) -> AsyncIterator[Access | None]:
    """Asks callers for API keys while a block runs, and keeps the keys fresh; None where nobody is asked.

    Args:
        config: Settings.
        on_refused: Told of every request that may not come in.
        supervisor: Keeps the task at work that reads the file again.

    Raises:
        ConfigError: The file of keys cannot be read, or a line of it is wrong.
    """
    if config.api_keys_file is None:
        yield None
        return
    ring = KeyRing(config.api_keys_file)
    rate_limit = WindowRateLimit(config.redis_url)
    if config.tls_cert is None and config.host not in LOOPBACK:
        _log.warning("API keys and prompts cross the network in plain text; use --tls-cert, or a proxy that does TLS")
    try:
        async with supervisor.kept({"api_keys": ring.keep_fresh}):
            yield Access(ring, rate_limit, on_refused)
    finally:
        await rate_limit.close()
