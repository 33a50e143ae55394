"""Runs a service that owns a model: registry, metrics, gRPC server and engine, started and stopped in order.

It knows no particular service: verifier and drafter each pass in a host.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import grpc
from prometheus_client import CollectorRegistry

from paceline.core.addresses import check_address, check_host, host_port
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import DRAFTER, VERIFIER, ModelIdentity
from paceline.core.pages import LEAST_PAGES
from paceline.engine.loop import EngineLoop
from paceline.engine.watch import stacks, until_hung
from paceline.obs.metrics import stalls_watched, tell_replica
from paceline.obs.metrics_page import metrics_server
from paceline.obs.tracing import ENDPOINT_HELP, Tracer, open_tracing
from paceline.service.config import setting
from paceline.service.credentials import CLIENT_ROLE_OF, FleetTls, only_for, show_days_left
from paceline.service.process import GARBAGE_OF_STEPS, GrpcServer, settle_heap, start_grpc_server, until_stopped
from paceline.service.supervision import TaskSupervisor, Work
from paceline.store.base import Replica, Store, require
from paceline.store.redis import open_store
from paceline.store.registry import EXPIRY_S, announced

logger = logging.getLogger(__name__)

LAST_CALLS_S = 1.0
# Time for last messages when the engine hangs.
FAREWELL_S = 1.0
# Most pages in a host's memory, which other processes need as well, unless a number is given.
HOST_PAGES: Mapping[str, int] = {VERIFIER: 2048, DRAFTER: 4096}
# Exit status of a process whose engine hung; "internal software error" in sysexits.h.
EXIT_HUNG = 70
# The event loop and the device's thread share one interpreter; the default of 5 ms is half a step.
SWITCH_INTERVAL_S = 0.0005


class ModelHost(Protocol):
    """The part of such a service that runs in the event loop."""

    identity: ModelIdentity
    max_sessions: int

    @property
    def num_sessions(self) -> int: ...

    @property
    def engine(self) -> EngineLoop[Any, Any]:
        """The engine; it loads the model when it is started."""
        ...

    def announced_at(self, address: str) -> None:
        """Receives the address by which others know it, before it serves."""
        ...

    def engine_died(self, problem: str) -> None:
        """Ends all sessions and takes no new ones: the engine will not come back."""
        ...

    async def wind_down(self) -> None:
        """Ends all sessions, each with an answer."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServiceConfig:
    """Settings that these services share; a service may change defaults, and describes other differences itself."""

    model: Path
    model_name: str = setting(
        "", help="Name in the registry, by which users ask for a target; empty: the folder's, or ORG/NAME."
    )
    host: str = setting("127.0.0.1", help="Address to listen on.")
    port: int = setting(help="gRPC port; 0 picks a free one.", low=0, high=65535)
    announce: str = setting(
        "", help="host:port at which other services reach this one, such as a proxy's; empty: its own host and port."
    )
    tls_dir: Path | None = setting(
        None,
        help="Folder with ca.pem, tls.pem and tls.key: mutual TLS between the tiers; without it plain text.",
    )
    health_port: int = setting(
        0, help="Plain-text gRPC port for health alone, for probes without a certificate; 0: none.", low=0, high=65535
    )
    metrics_port: int = setting(help="Prometheus port; 0 picks a free one.", low=0, high=65535)
    redis_url: str = setting("redis://127.0.0.1:6379", help="Registry; memory:// for none.")
    replica_id: str = setting("", help="Name of this replica in the registry; empty: role and address.")
    zone: str = setting(
        "", help="Zone that this replica runs in, such as a cloud's; those of one zone prefer each other."
    )
    otlp_traces_endpoint: str = setting("", help=ENDPOINT_HELP)
    dtype: str = setting(
        "auto",
        help="Weight type; auto: as stored, float16 as bfloat16.",
        choices=("auto", "bfloat16", "float32"),
    )
    device: str = setting("auto", help="Where the model runs.", choices=("auto", "cpu", "cuda"))
    threads: int = setting(1, help="Threads of a forward pass on the CPU.", low=1, high=1024)
    cpus: str = setting("", help="CPU numbers to keep to, such as 0,2-3; empty: all.")
    num_kv_blocks: int | None = setting(
        None,
        help="Pages of 16 tokens for committed KV; 0: as many as --memory-utilization allows and --max-num-seqs can "
        "fill. Without it the same on a GPU; on a CPU a verifier takes at most "
        f"{HOST_PAGES[VERIFIER]:,}, a drafter {HOST_PAGES[DRAFTER]:,}.",
        low=0,
        high=10_000_000,
    )
    memory_utilization: float = setting(
        0.9,
        help="Share of the memory that is free at start (of the GPU; on a CPU of the host or its container's limit) "
        "that the service may take.",
        low=0.01,
        high=1.0,
    )
    max_num_seqs: int
    max_num_batched_tokens: int = setting(help="Most rows of a step.", unit="tokens", low=16, high=65536)
    engine_stall_s: float = setting(
        help="Time inside one step after which the engine counts as hung, and the process ends; a verifier waits for "
        "two full steps at least.",
        unit="s",
        low=1,
        high=3600,
    )

    def __post_init__(self) -> None:
        """Checks the addresses, and the number of pages."""
        check_host("--host", self.host)
        if self.announce:
            check_address("--announce", self.announce)
        if self.num_kv_blocks and self.num_kv_blocks < LEAST_PAGES:
            raise ConfigError(f"--num-kv-blocks must be 0 or at least {LEAST_PAGES}, got {self.num_kv_blocks}")

    @property
    def num_pages(self) -> int:
        """Pages of committed KV, once `paceline.engine.memory` has planned them."""
        assert self.num_kv_blocks, "the memory of this service is not planned"
        return self.num_kv_blocks


def refuse_settings(config: ModelServiceConfig, engine: str, instead: Mapping[str, str]) -> None:
    """Refuses settings that another engine than ours takes no notice of.

    Args:
        config: Settings of a service.
        instead: By the name of a setting, what there is in its place.

    Raises:
        ConfigError: Names the first one that is not as it comes.
    """
    for field in fields(config):
        if field.name in instead and getattr(config, field.name) != field.default:
            name = field.name.replace("_", "-")
            raise ConfigError(f"--{name} is for our own engine; under --engine {engine} there is {instead[field.name]}")


def traces_of(config: ModelServiceConfig, role: str, *, sample_ratio: float) -> AbstractAsyncContextManager[Tracer]:
    """Opens the traces of such a service by `open_tracing`."""
    replica_id = config.replica_id or f"{role}-{config.announce or host_port(config.host, config.port)}"
    return open_tracing(
        config.otlp_traces_endpoint,
        sample_ratio,
        role=role,
        replica_id=replica_id,
        zone=config.zone,
    )


async def serve_model(
    host: ModelHost,
    config: ModelServiceConfig,
    *,
    role: str,
    service_name: str,
    add_servicer: Callable[[grpc.aio.Server], None],
    registry: CollectorRegistry,
    background: Callable[[Store], Mapping[str, Work]] = lambda store: {},
    prepared: Callable[[], Coroutine[Any, Any, None]] = lambda: asyncio.sleep(0),
    stall_s: Callable[[], float] | None = None,
    tls: FleetTls | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT, then announces that it drains, and leaves the registry when no session is left.

    Args:
        role: `verifier` or `drafter`.
        service_name: Full gRPC name.
        add_servicer: Adds the service to a server.
        registry: Metrics to show.
        background: Names the tasks that are kept running while the service runs.
        prepared: Awaited before the service says that it is ready.
        stall_s: Time inside one step after which the engine counts as hung; None: `--engine-stall-s`.
        tls: Own certificate, with which only the tier that this one serves may call; None: plain text, open to all.

    Raises:
        ConfigError: The checkpoint, a port or the registry makes serving impossible.
        Exception: The error that ended the engine.
    """
    # While it loads, there is nothing to finish. The first process of a container ignores signals without a handler,
    # and would otherwise finish loading after SIGTERM.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, os._exit, 128 + signal.SIGTERM)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    show_days_left(registry, {} if tls is None else tls.files)
    async with open_store(config.redis_url) as store:
        await require(store)
        with stalls_watched(registry), metrics_server(registry, config.host, config.metrics_port) as metrics_port:
            async with await start_grpc_server(
                host=config.host,
                port=config.port,
                add_servicers=add_servicer,
                service_names=[service_name],
                interceptors=() if tls is None else (only_for(CLIENT_ROLE_OF[role]),),
                credentials=None if tls is None else tls.server_credentials(),
                health_port=config.health_port,
            ) as server:
                host.announced_at(config.announce or server.address)
                await _load(host)
                supervisor = TaskSupervisor(registry)
                try:
                    async with supervisor.kept(background(store)):
                        await _prepare(prepared, host, role)
                        bound_s = stall_s or (lambda: config.engine_stall_s)
                        serving = _serve_announced(
                            host, config, role, server, store, registry, metrics_port, supervisor
                        )
                        await _unless_it_hangs(serving, host, role, server, bound_s)
                finally:
                    await host.close()


async def _load(host: ModelHost) -> None:
    logger.info("loads the model")
    await host.engine.start()
    logger.info("has loaded the model")
    settle_heap(GARBAGE_OF_STEPS)


async def engine_ended(host: ModelHost, role: str) -> None:
    """Waits until the engine ends; if by an error, ends all sessions and raises it."""
    try:
        await host.engine.ended()
    except Exception:
        host.engine_died(f"the {role}'s engine has stopped")
        raise


async def _prepare(prepared: Callable[[], Coroutine[Any, Any, None]], host: ModelHost, role: str) -> None:
    """Gets ready to serve; raises what ends the engine meanwhile."""
    tasks = asyncio.create_task(prepared()), asyncio.create_task(engine_ended(host, role))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in done:
            each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _unless_it_hangs(
    serving: Coroutine[Any, Any, None], host: ModelHost, role: str, server: GrpcServer, bound_s: Callable[[], float]
) -> None:
    """Serves to the end. If the engine hangs, ends the process with `EXIT_HUNG`, as no thread can be ended alone."""
    tasks = (
        asyncio.create_task(serving, name="serve"),
        asyncio.create_task(until_hung(host.engine.device, bound_s, _end_stalled), name="watch the device"),
    )
    served, watching = tasks
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not served.done():
            stuck_s = watching.result()
            _log_hang("the engine", stuck_s)
            try:
                await _shutdown_notice(host, role, served, server)
            finally:
                os._exit(EXIT_HUNG)
        await served
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _log_hang(what: str, stuck_s: float) -> None:
    logger.critical("%s hangs; the process ends", what, extra={"stuck_s": round(stuck_s, 1), "stacks": stacks()})


def _end_stalled(stuck_s: float) -> None:
    """The event loop hangs: no message can be sent; ending connections inform all peers."""
    _log_hang("the event loop", stuck_s)
    os._exit(EXIT_HUNG)


async def _shutdown_notice(host: ModelHost, role: str, serving: asyncio.Task[None], server: GrpcServer) -> None:
    """Ends all sessions with a status, and leaves the registry, within `FAREWELL_S`."""
    with suppress(TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await server.drain()
            host.engine_died(f"the {role}'s engine hangs")
            # This withdraws the replica.
            serving.cancel()
            await asyncio.gather(serving, server.stop(FAREWELL_S), return_exceptions=True)


async def _serve_announced(
    host: ModelHost,
    config: ModelServiceConfig,
    role: str,
    server: GrpcServer,
    store: Store,
    registry: CollectorRegistry,
    metrics_port: int,
    supervisor: TaskSupervisor,
) -> None:
    draining = False
    address = config.announce or server.address

    def replica() -> Replica:
        return Replica(
            replica_id=config.replica_id or f"{role}-{server.address}",
            role=role,
            address=address,
            identity=host.identity,
            max_sessions=host.max_sessions,
            num_sessions=host.num_sessions,
            draining=draining,
            # A proxy keeps the host, but does not translate this port.
            metrics_address=host_port(address.rpartition(":")[0], metrics_port),
            zone=config.zone,
        )

    me = replica()
    tell_replica(registry, role=role, replica_id=me.replica_id, address=me.address, model=host.identity.name)
    await server.ready(me.replica_id)
    async with announced(store, replica, supervisor):
        await until_stopped(engine_ended(host, role))
        draining = True
        # At once, not with the next heartbeat: the sooner gateways know, the sooner sessions move.
        with suppress(UnavailableError):
            await store.announce(replica(), EXPIRY_S)
        await server.drain()
        await host.wind_down()
    await server.stop(LAST_CALLS_S)
