"""A whole gateway inside one event loop: both doors, the background, and the order of stopping."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from paceline.core.errors import ConfigError
from paceline.core.messages import GATEWAY, REPLICA_ROLES, VERIFIER
from paceline.gateway.access.doors import Access, DoorTls, guarded, load_door_tls
from paceline.gateway.access.fair_shares import Shares
from paceline.gateway.api.app import ERROR_FORMS, create_app
from paceline.gateway.api.console.feed import ConsoleFeed, closed_at_end
from paceline.gateway.api.console.frames import OwnCounts
from paceline.gateway.api.endpoints.reading import BodyReader
from paceline.gateway.api.endpoints.workers import Workers
from paceline.gateway.api.grpc.door import MAX_MESSAGE_BYTES, GrpcDoor, door_options
from paceline.gateway.api.grpc.servicer import SERVICE_NAME, GatewayServicer
from paceline.gateway.api.guarded import GuardedApp
from paceline.gateway.api.responses.keeping import ResponseShelf
from paceline.gateway.config import GatewayConfig, model_aliases
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.fleet.generation_config import ModelDefaults
from paceline.gateway.fleet.routing import Router
from paceline.gateway.fleet.verifier_client import VerifierClient
from paceline.gateway.http.connection import BoundedConnection, Connections
from paceline.gateway.http.front import with_front
from paceline.gateway.sessions.failover import Placer
from paceline.gateway.sessions.readiness import readiness
from paceline.gateway.sessions.records import RecordWriter
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import Resumption
from paceline.gateway.text.codec import TextCodec
from paceline.obs.families import MODEL_NAME, service_registry, tell_replica
from paceline.obs.metrics import GatewayMetrics
from paceline.obs.stalls import stalls_watched
from paceline.obs.tracing import Tracer, open_tracing
from paceline.rpc.v1 import gateway_pb2_grpc
from paceline.service.credentials import load_tls
from paceline.service.process import GrpcServer, start_grpc_server
from paceline.service.supervision import Supervisor, Work
from paceline.store.announcer import announced
from paceline.store.base import Replica, Store
from paceline.store.view import Probe

logger = logging.getLogger(__name__)

BACKLOG = 2048
# Time to deliver the error that ends a session at the deadline.
FAREWELL_S = 2.0
# Connections beyond two for every session that may run: health checks, scrapers, clients about to be told to wait.
SPARE_CONNECTIONS = 256
# Bodies and messages that are read at once, in largest ones.
MAX_BODIES = 16
HEALTH_INTERVAL_S = 0.1
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """What both doors together, or each of them, may hold.

    Attributes:
        max_connections: Of each door; also calls on one connection.
        calls: GRPC calls under way.
        reading: Bytes of bodies and messages that are read, at both doors.
    """

    max_connections: int
    calls: Shares
    reading: Shares

    @classmethod
    def of(cls, config: GatewayConfig) -> DoorLimits:
        """Returns the limits that follow from the settings."""
        max_connections = 2 * config.max_sessions + SPARE_CONNECTIONS
        largest = max(config.max_body_bytes, MAX_MESSAGE_BYTES)
        return cls(
            max_connections=max_connections,
            calls=Shares(max_connections, "calls"),
            reading=Shares(MAX_BODIES * largest, "bytes of requests being read", unit=largest),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a started gateway listens, `host:port`."""

    http: str
    grpc: str


async def serve(
    config: GatewayConfig,
    store: Store,
    codecs: Mapping[str, TextCodec],
    stop: asyncio.Event,
    on_ready: Callable[[Addresses], None],
    defaults: Mapping[str, ModelDefaults] | None = None,
) -> None:
    """Serves until `stop` is set, then lets running sessions finish.

    Args:
        config: Settings.
        store: Registry and session records; remains the caller's.
        codecs: Tokenizers by model name.
        stop: Set from outside.
        on_ready: Called once both doors are open.
        defaults: Of models that have some, by name.

    Raises:
        ConfigError: A port is in use, or a certificate or API key cannot be used.
    """
    registry = service_registry(GATEWAY)
    # Known before any port is, since records name their owner.
    replica_id = config.replica_id or f"{GATEWAY}-{uuid.uuid4().hex[:12]}"
    async with open_tracing(
        config.otlp_traces_endpoint,
        config.trace_sample_ratio,
        role=GATEWAY,
        replica_id=replica_id,
        zone=config.zone,
        registry=registry,
    ) as tracer:
        with stalls_watched(registry), Workers() as texts, Workers() as grammars:
            workers = texts, grammars
            await _serve(config, store, codecs, defaults or {}, stop, on_ready, replica_id, registry, tracer, workers)


async def _serve(
    config: GatewayConfig,
    store: Store,
    codecs: Mapping[str, TextCodec],
    defaults: Mapping[str, ModelDefaults],
    stop: asyncio.Event,
    on_ready: Callable[[Addresses], None],
    replica_id: str,
    registry: CollectorRegistry,
    tracer: Tracer,
    workers: tuple[Workers, Workers],
) -> None:
    tls = load_tls(config.tls_dir, GATEWAY)
    fleet = _fleet(config, store, codecs, defaults, Probe(tls))
    supervisor = Supervisor(registry)
    records = RecordWriter(store, ttl_s=config.record_ttl_s, owner=replica_id)
    client = VerifierClient(config.verifier_silence_s, tls)
    metrics = GatewayMetrics(registry, codecs)
    placer = _placer(config, fleet, client, metrics, tracer)
    sessions = Sessions(
        fleet=fleet,
        client=client,
        placer=placer,
        records=records,
        metrics=metrics,
        max_sessions=config.max_sessions,
    )
    limits = DoorLimits.of(config)
    console = _console(config, replica_id, fleet, sessions, placer, registry)
    resumption = Resumption(store, fleet, replica_id)
    app = create_app(
        sessions=sessions,
        fleet=fleet,
        resumption=resumption,
        registry=registry,
        reader=_reader(config, limits, workers, metrics),
        shelf=ResponseShelf(store, config.response_ttl_s),
        started_s=int(time.time()),
        console=console,
        tracer=tracer,
        supervisor=supervisor,
    )
    servicer = GatewayServicer(sessions, fleet, resumption, *workers, tracer)
    follow_fleet = partial(_follow_fleet, metrics, store, fleet, sessions, placer, replica_id)

    def ready() -> bool:
        return readiness(sessions, fleet, supervisor.failing).ready

    async with (
        _background(config, fleet, client, records, follow_fleet, supervisor),
        guarded(
            config.api_keys_file,
            config.redis_url,
            sessions.count_error,
            supervisor,
            plain_text=config.tls_cert is None and config.host not in LOOPBACK,
        ) as access,
        _doors(config, app, servicer, sessions, access, limits) as (addresses, grpc_server),
        supervisor.kept({"health": partial(_follow_health, grpc_server, ready)}),
        announced(store, lambda: _replica(replica_id, config, addresses, sessions), supervisor),
        # Streams without an end would hold up the HTTP server's.
        closed_at_end(console),
    ):
        tell_replica(registry, role=GATEWAY, replica_id=replica_id, address=addresses.grpc)
        on_ready(addresses)
        await stop.wait()


def _fleet(
    config: GatewayConfig,
    store: Store,
    codecs: Mapping[str, TextCodec],
    defaults: Mapping[str, ModelDefaults],
    probe: Probe,
) -> Fleet:
    return Fleet(
        store,
        codecs,
        probe,
        defaults=defaults,
        aliases=model_aliases(config.served_model_name, sorted(codecs)),
        trusts_templates=config.trust_request_chat_template,
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )


def _reader(
    config: GatewayConfig, limits: DoorLimits, workers: tuple[Workers, Workers], metrics: GatewayMetrics
) -> BodyReader:
    return BodyReader(
        max_bytes=config.max_body_bytes,
        timeout_s=config.body_timeout_s,
        reading=limits.reading,
        workers=workers[0],
        grammar_workers=workers[1],
        strict_fields=config.strict_fields,
        ignored_fields=metrics.ignored_fields,
    )


def _follow_fleet(
    metrics: GatewayMetrics, store: Store, fleet: Fleet, sessions: Sessions, placer: Placer, replica_id: str
) -> None:
    metrics.registry_bad_entries.set(store.num_bad_entries)
    _count_fleet(metrics, fleet)
    sessions.drain(draining=fleet.is_draining(replica_id))
    placer.move_away()


def _count_fleet(metrics: GatewayMetrics, fleet: Fleet) -> None:
    metrics.store_up.set(fleet.store_error is None)
    num_active = Counter(each.role for each in fleet.replicas if not each.draining)
    for role in REPLICA_ROLES:
        metrics.replicas.labels(role).set(num_active[role])


def _placer(
    config: GatewayConfig, fleet: Fleet, client: VerifierClient, metrics: GatewayMetrics, tracer: Tracer
) -> Placer:
    return Placer(
        fleet=fleet,
        router=Router(zone=config.zone),
        client=client,
        failover_s=config.failover_s,
        max_wait_s=config.max_wait_s,
        on_failover=lambda reason: metrics.failovers.labels(reason).inc(),
        on_ejected=lambda replica_id: _note_ejection(metrics, replica_id),
        tracer=tracer,
    )


def _note_ejection(metrics: GatewayMetrics, replica_id: str) -> None:
    logger.warning("a verifier fails its sessions and gets none for a while", extra={"verifier": replica_id})
    metrics.ejections.inc()


def _console(
    config: GatewayConfig,
    replica_id: str,
    fleet: Fleet,
    sessions: Sessions,
    placer: Placer,
    registry: CollectorRegistry,
) -> ConsoleFeed | None:
    def own_counts() -> OwnCounts:
        verifiers = {replica.replica_id for replica in fleet.replicas if replica.role == VERIFIER}
        return OwnCounts(
            replica_id=replica_id,
            num_sessions=sessions.num_running,
            sessions_at={name: count for name, count in placer.in_flight.items() if count and name in verifiers},
            tokens=sum(
                registry.get_sample_value("vllm:generation_tokens_total", {MODEL_NAME: name}) or 0.0
                for name in fleet.own_names
            ),
        )

    return ConsoleFeed(lambda: fleet.replicas, own_counts) if config.console else None


def _replica(replica_id: str, config: GatewayConfig, addresses: Addresses, sessions: Sessions) -> Replica:
    return Replica(
        replica_id=replica_id,
        role=GATEWAY,
        address=addresses.grpc,
        max_sessions=config.max_sessions,
        num_sessions=sessions.num_running,
        draining=sessions.stopping,
        zone=config.zone,
    )


@asynccontextmanager
async def _doors(
    config: GatewayConfig,
    app: ASGIApp,
    servicer: GatewayServicer,
    sessions: Sessions,
    access: Access | None,
    limits: DoorLimits,
) -> AsyncIterator[tuple[Addresses, GrpcServer]]:
    """Opens both doors while a block runs; running sessions finish before the doors close."""
    tls = load_door_tls(config.tls_cert, config.tls_key)
    with listening_socket(config.host, config.port) as listener:
        grpc_server = await _start_grpc(config, servicer, access, limits, tls)
        try:
            fronted = with_front(
                GuardedApp(app, access, ERROR_FORMS),
                allowed_origins=config.allowed_origins,
                access_log=config.access_log,
            )
            async with _http_server(fronted, listener, limits.max_connections, tls):
                http = f"{config.host}:{listener.getsockname()[1]}"
                yield Addresses(http=http, grpc=grpc_server.address), grpc_server
                # Health says no and new requests are refused, but both doors stay open to say so.
                await grpc_server.drain()
                await sessions.finish(config.grace_s, FAREWELL_S)
        finally:
            await grpc_server.stop(FAREWELL_S)


async def _start_grpc(
    config: GatewayConfig, servicer: GatewayServicer, access: Access | None, limits: DoorLimits, tls: DoorTls | None
) -> GrpcServer:
    door = GrpcDoor(
        _let_in if access is None else access.admit_call,
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
            options=door_options(limits.max_connections),
            credentials=None if tls is None else tls.server_credentials(),
        )
    except ConfigError as error:
        # The other services have one port; here the flag of that name is the HTTP door's.
        raise ConfigError(str(error).replace("--port", "--grpc-port")) from error


async def _let_in(*_: object) -> None:
    """Asks nobody for a key."""


async def _follow_health(server: GrpcServer, ready: Callable[[], bool]) -> None:
    """Keeps health over gRPC true, for ever."""
    while True:
        await (server.ready() if ready() else server.not_ready())
        await asyncio.sleep(HEALTH_INTERVAL_S)


@contextmanager
def listening_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Listens for HTTP while a block runs; port 0 picks a free one.

    Raises:
        ConfigError: The port is in use, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port (0 picks a free one)"
            ) from error
        yield listener


@asynccontextmanager
async def _http_server(
    app: ASGIApp, listener: socket.socket, max_connections: int, tls: DoorTls | None
) -> AsyncIterator[None]:
    """Serves the application in this event loop while a block runs."""
    settings = uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        loop="none",
        # One connection more than these closes an idle one; uvicorn's own limit would refuse whoever comes.
        http=partial(BoundedConnection, connections=Connections(max_connections)),  # type: ignore[arg-type]
        ws="none",
        timeout_graceful_shutdown=5,
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


@asynccontextmanager
async def _background(
    config: GatewayConfig,
    fleet: Fleet,
    client: VerifierClient,
    records: RecordWriter,
    on_refreshed: Callable[[], None],
    supervisor: Supervisor,
) -> AsyncIterator[None]:
    """Keeps the fleet fresh and writes records while a block runs; writes what is left at its end."""
    await fleet.refresh()
    on_refreshed()
    tasks: dict[str, Work] = {
        "fleet": partial(fleet.keep_fresh, config.refresh_s, client, on_refreshed),
        "records": partial(records.keep_writing, config.record_interval_s),
    }
    try:
        async with supervisor.kept(tasks):
            yield
    finally:
        await records.flush()
        await client.close()
