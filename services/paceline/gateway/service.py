"""A whole gateway inside one event loop: how its parts are joined, and in which order they stop."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from paceline.core.messages import GATEWAY, REPLICA_ROLES
from paceline.gateway.access.doors import guarded
from paceline.gateway.access.keys import KeyRing
from paceline.gateway.api.app import create_app
from paceline.gateway.api.console.figures import Figures
from paceline.gateway.api.endpoints.endpoint import BodyReader, Workers
from paceline.gateway.api.grpc.servicer import GatewayServicer
from paceline.gateway.api.responses.kept import ResponseShelf
from paceline.gateway.config import GatewayConfig, model_aliases
from paceline.gateway.doors import Addresses, DoorLimits, follow_health, load_door_tls, open_doors
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
from paceline.service.supervision import TaskSupervisor, Work
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
        defaults: Defaults of models that have some, by name.

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
    ) as tracer:
        with stalls_watched(registry), Workers() as workers:
            await _Gateway(config, store, codecs, defaults or {}, replica_id, registry, tracer, workers).serve(
                stop, on_ready
            )


class _Gateway:
    """The parts of one gateway."""

    def __init__(
        self,
        config: GatewayConfig,
        store: Store,
        codecs: Mapping[str, TextCodec],
        defaults: Mapping[str, ModelDefaults],
        replica_id: str,
        registry: CollectorRegistry,
        tracer: Tracer,
        workers: Workers,
    ) -> None:
        self._config, self._store, self._replica_id, self._registry = config, store, replica_id, registry
        tls = load_tls(config.tls_dir, GATEWAY)
        self._door_tls = load_door_tls(config.tls_cert, config.tls_key)
        own = {} if self._door_tls is None else {"tls-cert": self._door_tls.certificate_pem}
        show_days_left(registry, {**({} if tls is None else tls.files), **own})
        self._supervisor = TaskSupervisor(registry)
        self._metrics = GatewayMetrics(registry, codecs)
        self._keys = keys = None if config.api_keys_file is None else KeyRing(config.api_keys_file)
        if keys is not None:
            self._metrics.api_keys_bad_lines.set_function(lambda: keys.num_problems)
        self._fleet = _fleet(config, store, codecs, defaults, partial(serves, tls), self._metrics)
        self._client = VerifierClient(config.verifier_silence_s, tls)
        self._records = RecordWriter(store, ttl_s=config.record_ttl_s, owner=replica_id)
        self._failover = _failover(config, self._fleet, self._client, self._metrics, tracer)
        self._sessions = Sessions(
            fleet=self._fleet,
            client=self._client,
            failover=self._failover,
            records=self._records,
            metrics=self._metrics,
            max_sessions=config.max_sessions,
        )
        self._limits = DoorLimits.of(config, open_files_limit())
        resumption = Resumption(store, self._fleet, replica_id)
        self._shelf = ResponseShelf(
            store, resumption, workers, ttl_s=config.response_ttl_s, room_bytes=config.response_room_bytes
        )
        self._app = self._make_app(resumption, workers, tracer)
        self._servicer = GatewayServicer(self._sessions, self._fleet, resumption, workers, tracer)

    def _make_app(self, resumption: Resumption, workers: Workers, tracer: Tracer) -> ASGIApp:
        config, fleet = self._config, self._fleet
        reader = BodyReader(
            max_bytes=config.max_body_bytes,
            timeout_s=config.body_timeout_s,
            reading=self._limits.reading,
            workers=workers,
            strict_fields=config.strict_fields,
        )
        return create_app(
            sessions=self._sessions,
            fleet=fleet,
            resumption=resumption,
            registry=self._registry,
            reader=reader,
            shelf=self._shelf,
            started_s=int(time.time()),
            ping_s=config.stream_ping_s,
            console=Figures(lambda: fleet.replicas) if config.console else None,
            tracer=tracer,
            supervisor=self._supervisor,
            keys=self._keys,
        )

    async def serve(self, stop: asyncio.Event, on_ready: Callable[[Addresses], None]) -> None:
        """Serves until `stop` is set, then lets running sessions finish."""
        config, sessions, supervisor = self._config, self._sessions, self._supervisor
        plain_text = config.tls_cert is None and config.host not in LOOPBACK
        async with (
            self._background(),
            guarded(self._keys, config.redis_url, sessions.count_error, supervisor, plain_text=plain_text) as access,
            open_doors(config, self._app, self._servicer, sessions, access, self._limits, self._door_tls) as (
                addresses,
                grpc_server,
            ),
            supervisor.kept({"health": partial(follow_health, grpc_server, self._is_ready)}),
            announced(self._store, partial(self._replica, addresses), supervisor),
        ):
            tell_replica(self._registry, role=GATEWAY, replica_id=self._replica_id, address=addresses.grpc)
            on_ready(addresses)
            await stop.wait()

    @asynccontextmanager
    async def _background(self) -> AsyncIterator[None]:
        """Keeps the fleet fresh and writes records and responses while a block runs; writes what is left at its end."""
        await self._fleet.refresh()
        self._follow_fleet()
        tasks: dict[str, Work] = {
            "fleet": partial(self._fleet.keep_fresh, self._config.refresh_s, self._client, self._follow_fleet),
            "records": partial(self._records.keep_writing, self._config.record_interval_s),
            "responses": self._shelf.keep_writing,
        }
        try:
            async with self._supervisor.kept(tasks):
                yield
        finally:
            await self._records.flush()
            await self._shelf.flush()
            await self._client.close()

    def _is_ready(self) -> bool:
        ready, _ = readiness(self._sessions, self._fleet, self._supervisor.failing)
        return ready

    def _follow_fleet(self) -> None:
        metrics, fleet = self._metrics, self._fleet
        metrics.registry_bad_entries.set(self._store.num_bad_entries)
        metrics.store_up.set(fleet.store_error is None)
        num_active = Counter(each.role for each in fleet.replicas if not each.draining)
        for role in REPLICA_ROLES:
            metrics.replicas.labels(role).set(num_active[role])
        self._sessions.drain(draining=fleet.is_draining(self._replica_id))
        self._failover.move_away()

    def _replica(self, addresses: Addresses) -> Replica:
        return Replica(
            replica_id=self._replica_id,
            role=GATEWAY,
            address=addresses.grpc,
            max_sessions=self._config.max_sessions,
            num_sessions=self._sessions.num_running,
            draining=self._sessions.stopping,
            zone=self._config.zone,
        )


def _fleet(
    config: GatewayConfig,
    store: Store,
    codecs: Mapping[str, TextCodec],
    defaults: Mapping[str, ModelDefaults],
    probe: Answers,
    metrics: GatewayMetrics,
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
        on_ejected=partial(_note_ejection, metrics),
    )


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
        tracer=tracer,
    )


def _note_ejection(metrics: GatewayMetrics, replica_id: str) -> None:
    logger.warning("a verifier fails its sessions and gets none for a while", extra={"verifier": replica_id})
    metrics.ejections.inc()
