"""A whole gateway inside one event loop: how its parts are joined, and in which order they stop."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry

from paceline.core.messages import GATEWAY, REPLICA_ROLES
from paceline.gateway.access.doors import Access, guarded, load_door_tls
from paceline.gateway.access.keys import KeyRing
from paceline.gateway.api.app import create_app
from paceline.gateway.api.console.figures import Figures
from paceline.gateway.api.endpoints.endpoint import BodyReader, Workers
from paceline.gateway.api.grpc.servicer import GatewayServicer
from paceline.gateway.api.responses.kept import KeepingWriter, ResponseShelf
from paceline.gateway.config import GatewayConfig, model_aliases
from paceline.gateway.doors import Addresses, DoorLimits, follow_health, open_doors
from paceline.gateway.fleet.fleet import Fleet
from paceline.gateway.fleet.generation_config import ModelDefaults
from paceline.gateway.fleet.routing import Router
from paceline.gateway.fleet.verifier_client import VerifierClient
from paceline.gateway.sessions.failover import Failover
from paceline.gateway.sessions.readiness import readiness
from paceline.gateway.sessions.records import RecordWriter
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import Resumption
from paceline.gateway.text.codec import TextCodec
from paceline.obs.metrics import GatewayMetrics, service_registry, stalls_watched, tell_replica
from paceline.obs.tracing import Tracer, open_tracing
from paceline.service.credentials import load_tls, show_days_left
from paceline.service.process import open_files_limit
from paceline.service.supervision import Supervisor, Work
from paceline.store.base import Replica, Store
from paceline.store.registry import Answers, announced, serves

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
        with stalls_watched(registry), Workers() as workers:
            await _serve(config, store, codecs, defaults or {}, stop, on_ready, replica_id, registry, tracer, workers)


def _is_ready(sessions: Sessions, fleet: Fleet, supervisor: Supervisor) -> bool:
    return readiness(sessions, fleet, supervisor.failing).ready


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
    workers: Workers,
) -> None:
    tls = load_tls(config.tls_dir, GATEWAY)
    keys = None if config.api_keys_file is None else KeyRing(config.api_keys_file)
    door_tls = load_door_tls(config.tls_cert, config.tls_key)
    show_days_left(registry, {name: pem for each in (tls, door_tls) if each for name, pem in each.files.items()})
    fleet = _fleet(config, store, codecs, defaults, partial(serves, tls))
    supervisor = Supervisor(registry)
    records = RecordWriter(store, ttl_s=config.record_ttl_s, owner=replica_id)
    client = VerifierClient(config.verifier_silence_s, tls)
    metrics = GatewayMetrics(registry, codecs)
    if keys is not None:
        metrics.api_keys_bad_lines.set_function(lambda: keys.num_problems)
    failover = _failover(config, fleet, client, metrics, tracer)
    sessions = Sessions(
        fleet=fleet,
        client=client,
        failover=failover,
        records=records,
        metrics=metrics,
        max_sessions=config.max_sessions,
    )
    limits = DoorLimits.of(config, open_files_limit())
    resumption = Resumption(store, fleet, replica_id)
    shelf = ResponseShelf(store.documents, workers, ttl_s=config.response_ttl_s, room_bytes=config.response_room_bytes)
    app = create_app(
        sessions=sessions,
        fleet=fleet,
        resumption=resumption,
        registry=registry,
        reader=_reader(config, limits, workers),
        shelf=shelf,
        started_s=int(time.time()),
        console=Figures(lambda: fleet.replicas) if config.console else None,
        tracer=tracer,
        supervisor=supervisor,
        keys=keys,
    )
    servicer = GatewayServicer(sessions, fleet, resumption, workers, tracer)
    follow_fleet = partial(_follow_fleet, metrics, store, fleet, sessions, failover, replica_id)
    async with (
        _background(config, fleet, client, records, shelf.writer, follow_fleet, supervisor),
        _guarded(config, keys, sessions, supervisor) as access,
        open_doors(config, app, servicer, sessions, access, limits) as (addresses, grpc_server),
        supervisor.kept(
            {"health": partial(follow_health, grpc_server, partial(_is_ready, sessions, fleet, supervisor))}
        ),
        announced(store, lambda: _replica(replica_id, config, addresses, sessions), supervisor),
    ):
        tell_replica(registry, role=GATEWAY, replica_id=replica_id, address=addresses.grpc)
        on_ready(addresses)
        await stop.wait()


def _guarded(
    config: GatewayConfig, keys: KeyRing | None, sessions: Sessions, supervisor: Supervisor
) -> AbstractAsyncContextManager[Access | None]:
    plain_text = config.tls_cert is None and config.host not in LOOPBACK
    return guarded(keys, config.redis_url, sessions.count_error, supervisor, plain_text=plain_text)


def _fleet(
    config: GatewayConfig,
    store: Store,
    codecs: Mapping[str, TextCodec],
    defaults: Mapping[str, ModelDefaults],
    probe: Answers,
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


def _reader(config: GatewayConfig, limits: DoorLimits, workers: Workers) -> BodyReader:
    return BodyReader(
        max_bytes=config.max_body_bytes,
        timeout_s=config.body_timeout_s,
        reading=limits.reading,
        workers=workers,
        strict_fields=config.strict_fields,
    )


def _follow_fleet(
    metrics: GatewayMetrics, store: Store, fleet: Fleet, sessions: Sessions, failover: Failover, replica_id: str
) -> None:
    metrics.registry_bad_entries.set(store.num_bad_entries)
    _count_fleet(metrics, fleet)
    sessions.drain(draining=fleet.is_draining(replica_id))
    failover.move_away()


def _count_fleet(metrics: GatewayMetrics, fleet: Fleet) -> None:
    metrics.store_up.set(fleet.store_error is None)
    num_active = Counter(each.role for each in fleet.replicas if not each.draining)
    for role in REPLICA_ROLES:
        metrics.replicas.labels(role).set(num_active[role])


def _failover(
    config: GatewayConfig, fleet: Fleet, client: VerifierClient, metrics: GatewayMetrics, tracer: Tracer
) -> Failover:
    return Failover(
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
async def _background(
    config: GatewayConfig,
    fleet: Fleet,
    client: VerifierClient,
    records: RecordWriter,
    responses: KeepingWriter,
    on_refreshed: Callable[[], None],
    supervisor: Supervisor,
) -> AsyncIterator[None]:
    """Keeps the fleet fresh and writes records and responses while a block runs; writes what is left at its end."""
    await fleet.refresh()
    on_refreshed()
    tasks: dict[str, Work] = {
        "fleet": partial(fleet.keep_fresh, config.refresh_s, client, on_refreshed),
        "records": partial(records.keep_writing, config.record_interval_s),
        "responses": responses.keep_writing,
    }
    try:
        async with supervisor.kept(tasks):
            yield
    finally:
        await records.flush()
        await responses.flush()
        await client.close()
