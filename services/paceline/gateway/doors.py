"""The two doors of a gateway, HTTP and gRPC: what they may hold, how they open, and how they close."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import grpc
import uvicorn
from starlette.types import ASGIApp

from paceline.core.addresses import host_port, is_ipv6
from paceline.core.errors import ConfigError
from paceline.gateway.access.doors import Access
from paceline.gateway.api.app import ERROR_FORMS
from paceline.gateway.api.auth import GuardedApp
from paceline.gateway.api.grpc.door import MAX_MESSAGE_BYTES, GrpcDoor, door_options
from paceline.gateway.api.grpc.servicer import SERVICE_NAME, GatewayServicer
from paceline.gateway.config import GatewayConfig
from paceline.gateway.http.connection import BoundedConnection
from paceline.gateway.http.middleware import with_middleware
from paceline.gateway.sessions.sessions import Sessions
from paceline.rpc.v1 import gateway_pb2_grpc
from paceline.service.credentials import read_certificates, read_key, utc_now
from paceline.service.fair_shares import EvictingLimit, Shares
from paceline.service.process import GrpcServer, start_grpc_server

BACKLOG = 2048
# Time to deliver the error that ends a session at the deadline.
FAREWELL_S = 2.0
# Connections beyond two for every session that may run: health checks, scrapers, clients about to get status 429.
SPARE_CONNECTIONS = 256
# This part of the connections over HTTP is never busy with requests: it makes room for new ones, such as probes.
IDLE_PART = 8
# Files beside the connections of clients: those to verifiers, store and replicas whose metrics the console reads, logs.
RESERVED_FILES = 256
MIN_CONNECTIONS = 32
# Bodies and messages that are read at once, counted in largest ones.
MAX_BODIES = 16
HEALTH_INTERVAL_S = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """Limits on the requests of both doors, together or each.

    Attributes:
        max_connections: Connections of each door; also calls on one connection.
        calls: GRPC calls under way.
        requests: HTTP requests under way.
        reading: Bytes of bodies and messages that are read, at both doors.
    """

    max_connections: int
    calls: Shares
    requests: Shares
    reading: Shares

    @classmethod
    def of(cls, config: GatewayConfig, most_files: int) -> DoorLimits:
        """Returns the limits that follow from the settings.

        Args:
            most_files: Files that the process may have open.

        Raises:
            ConfigError: These are too few for any door.
        """
        max_connections = _connections(2 * config.max_sessions + SPARE_CONNECTIONS, most_files)
        largest = max(config.max_body_bytes, MAX_MESSAGE_BYTES)
        return cls(
            max_connections=max_connections,
            calls=Shares(max_connections, "calls"),
            requests=Shares(max_connections - -(-max_connections // IDLE_PART), "requests"),
            reading=Shares(MAX_BODIES * largest, "bytes of requests being read"),
        )


def _connections(wanted: int, most_files: int) -> int:
    """Returns how many connections each door takes, so that all fit below the limit of open files."""
    fitting = (most_files - RESERVED_FILES) // 2
    if fitting < min(wanted, MIN_CONNECTIONS):
        least = RESERVED_FILES + 2 * MIN_CONNECTIONS
        raise ConfigError(f"ulimit -n: {most_files} open files are too few for a gateway; allow at least {least}")
    if fitting < wanted:
        told = {
            "connections": fitting,
            "wanted": wanted,
            "open_files": most_files,
            "to_have_all": 2 * wanted + RESERVED_FILES,
        }
        _log.warning("each door takes fewer connections, as the limit of open files (ulimit -n) is low", extra=told)
    return min(wanted, fitting)


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorTls:
    """The certificate that both doors present to clients, who need none themselves."""

    certificate: Path
    key: Path
    certificate_pem: bytes
    key_pem: bytes = field(repr=False)


def load_door_tls(certificate: Path | None, key: Path | None) -> DoorTls | None:
    """Reads `--tls-cert` and `--tls-key`; None without them, which means plain text.

    Raises:
        ConfigError: A file is missing, unreadable, expired, or the two do not belong together.
    """
    if certificate is None or key is None:
        return None
    certificate_pem, certificates = read_certificates("--tls-cert", certificate, utc_now())
    key_pem = read_key("--tls-key", key, certificates[0])
    return DoorTls(certificate=certificate, key=key, certificate_pem=certificate_pem, key_pem=key_pem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a started gateway listens, `host:port`."""

    http: str
    grpc: str


@asynccontextmanager
async def open_doors(
    config: GatewayConfig,
    app: ASGIApp,
    servicer: GatewayServicer,
    sessions: Sessions,
    access: Access | None,
    limits: DoorLimits,
    tls: DoorTls | None,
) -> AsyncIterator[tuple[Addresses, GrpcServer]]:
    """Opens both doors while a block runs; running sessions finish before the doors close."""
    with listening_socket(config.host, config.port) as listener:
        grpc_server = await _start_grpc(config, servicer, access, limits, tls)
        try:
            wrapped = with_middleware(
                GuardedApp(app, access, ERROR_FORMS, limits.requests, sessions.count_error),
                allowed_origins=config.allowed_origins,
                access_log=config.access_log,
            )
            async with _http_server(config, wrapped, listener, limits.max_connections, tls):
                http = host_port(config.host, listener.getsockname()[1])
                yield Addresses(http=http, grpc=grpc_server.address), grpc_server
                # Health checks fail and new requests are refused, but both doors stay open to answer them.
                await grpc_server.drain()
                await sessions.finish(config.grace_s, FAREWELL_S)
        finally:
            await grpc_server.stop(FAREWELL_S)


async def _start_grpc(
    config: GatewayConfig, servicer: GatewayServicer, access: Access | None, limits: DoorLimits, tls: DoorTls | None
) -> GrpcServer:
    door = GrpcDoor(
        admit_anyone if access is None else access.admit_call,
        calls=limits.calls,
        reading=limits.reading,
        timeout_s=config.body_timeout_s,
    )
    try:
        return await start_grpc_server(
            host=config.host,
            port=config.grpc_port,
            add_servicers=lambda it: gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, it),
            service_names=[SERVICE_NAME],
            interceptors=(door,),
            options=door_options(limits.max_connections, config.grpc_connection_age_s),
            credentials=None if tls is None else grpc.ssl_server_credentials([(tls.key_pem, tls.certificate_pem)]),
        )
    except ConfigError as error:
        # The other services have one port; here the flag of that name is the HTTP door's.
        raise ConfigError(str(error).replace("--port", "--grpc-port")) from error


async def admit_anyone(*_: object) -> None:
    """Requires no key."""


async def follow_health(server: GrpcServer, ready: Callable[[], bool]) -> None:
    """Keeps health over gRPC up to date."""
    while True:
        await (server.ready() if ready() else server.not_ready())
        await asyncio.sleep(HEALTH_INTERVAL_S)


@contextmanager
def listening_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Listens for HTTP while a block runs; port 0 picks a free one.

    Raises:
        ConfigError: The port is in use, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if is_ipv6(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host_port(host, port)} ({error.strerror}); choose another with --host or "
                "--port (0 picks a free one)"
            ) from error
        yield listener


@asynccontextmanager
async def _http_server(
    config: GatewayConfig, app: ASGIApp, listener: socket.socket, max_connections: int, tls: DoorTls | None
) -> AsyncIterator[None]:
    """Serves the application in this event loop while a block runs."""
    connections = EvictingLimit(max_connections, BoundedConnection.end, lambda each: each.is_idle)
    settings = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        loop="none",
        # A connection beyond these closes an idle one; uvicorn's own limit would refuse the new one.
        http=partial(BoundedConnection, connections=connections),  # type: ignore[arg-type]
        ws="none",
        timeout_graceful_shutdown=5,
        timeout_keep_alive=config.idle_connection_s,  # type: ignore[arg-type]  # it goes to a timer
        # uvicorn believes all of this machine otherwise.
        proxy_headers=bool(config.forwarded_allow_ips),
        forwarded_allow_ips=list(config.forwarded_allow_ips),
        server_header=False,
        ssl_certfile=None if tls is None else tls.certificate,
        ssl_keyfile=None if tls is None else tls.key,
    )
    server = _HttpServer(settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    try:
        yield
    finally:
        server.should_exit = True
        await serving


class _HttpServer(uvicorn.Server):
    """Leaves signals to the process, which serves gRPC as well."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
