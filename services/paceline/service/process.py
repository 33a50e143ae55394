"""Sets up what all services share: gRPC server with health and reflection, event loop, signals.

It knows no service: servicers are passed in. gRPC asyncio objects belong to one event loop, so a process runs one loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

import grpc
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from paceline.core.addresses import host_port
from paceline.core.errors import ConfigError, PacelineError
from paceline.service.config import as_called, exit_with_error
from paceline.service.status import ErrorInterceptor

# Name in the health service for whether the process is alive, ready or not.
LIVENESS = "liveness"
# Objects until the first generation is collected, and collections of each until the next one is. Freeing 20,000 objects
# of ended calls takes some 30 ms of an event loop. In an engine, steps make and drop thousands of objects: by the
# interpreter's own thresholds collections double the time of a step's bookkeeping.
GARBAGE_OF_REQUESTS, GARBAGE_OF_STEPS = (700, 10, 3), (2_000, 3, 2)
# Time for ended calls to send their status.
LAST_CALLS_S = 1.0

ResultT = TypeVar("ResultT")

# A prompt of a million tokens is at most 5 MB on the wire; gRPC's own limit of 4 MB would refuse it.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The tiers are neighbours; a proxy for outside traffic would swallow their calls.
    ("grpc.enable_http_proxy", 0),
)
# A host that vanished answers no ping, and tells nobody that it is gone. Pings go on while no data do.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The time that gRPC really waits for an answer: a minute otherwise.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)
_SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    # Otherwise a verifier would compute the sessions of a gateway that vanished for hours, and `paceline drain` wait.
    *KEEPALIVE_OPTIONS,
    # Otherwise two processes could share a port unnoticed and answer in turn.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
)

_log = logging.getLogger(__name__)


class GrpcServer:
    """A started gRPC server; health answers NOT_SERVING until `ready`, and again from `drain` on.

    As a context manager it stops at the end of the block; calls left then are cancelled after a moment.
    Health of the service `liveness` is always SERVING: not ready does not mean dead.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: Any,
        service_names: Sequence[str],
        *,
        host: str,
        port: int,
        health_server: grpc.aio.Server | None = None,
    ) -> None:
        self._server = server
        self._health_server = health_server
        self._health = health_servicer
        self._health_names = (health.OVERALL_HEALTH, *service_names)
        self._draining = False
        self.host = host
        self.port = port

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop(LAST_CALLS_S)

    @property
    def address(self) -> str:
        return host_port(self.host, self.port)

    async def ready(self, replica_id: str = "") -> None:
        """Sets health to SERVING, also under the replica id, which no other process has."""
        if replica_id and replica_id not in self._health_names:
            self._health_names = (*self._health_names, replica_id)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def not_ready(self) -> None:
        """Sets health to NOT_SERVING, for a service that may recover."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def drain(self) -> None:
        """Sets health to NOT_SERVING for good; calls are still served."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._draining = True

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, waits up to `grace_s` seconds for running ones and then cancels them."""
        await self.drain()
        await self._server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(0)

    async def lives(self) -> None:
        """Sets the health of `liveness` to SERVING."""
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None:
        if self._draining:
            return
        for name in self._health_names:
            await self._health.set(name, status)


async def start_grpc_server(
    *,
    host: str,
    port: int,
    add_servicers: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),  # type: ignore[type-arg]  # generic in stubs only
    credentials: grpc.ServerCredentials | None = None,
    health_port: int = 0,
    options: Sequence[tuple[str, int]] = (),
) -> GrpcServer:
    """Starts a server with health and reflection; port 0 picks a free one.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        add_servicers: Adds the service's own servicers to the server given.
        service_names: Full names of these, such as `paceline.rpc.v1.Verifier`.
        interceptors: Run inside the one that maps errors, so that their errors get status codes.
        credentials: Makes it a TLS server; None: plain text.
        health_port: Another port, plain text, for the health service alone; 0: none.
        options: Options of gRPC; override those of all services.

    Raises:
        ConfigError: The port is in use, or the address does not belong to this machine.
    """
    server = grpc.aio.server(interceptors=[ErrorInterceptor(), *interceptors], options=_with(options))
    health_servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined]  # stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    add_servicers(server)
    reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    bound_port = _bind(server, host, port, credentials)
    health_server = await _start_health_server(health_servicer, host, health_port) if health_port else None
    started = GrpcServer(
        server, health_servicer, service_names, host=host, port=bound_port, health_server=health_server
    )
    await started.not_ready()
    await started.lives()
    await server.start()
    _log.info("grpc server listens", extra={"address": started.address})
    return started


def settle_heap(thresholds: tuple[int, int, int]) -> None:
    """Excludes everything loaded so far from garbage collection, and gives back what loading has freed.

    Ended calls leave cycles behind. If the half million objects of torch and the tokenizer counted, a full collection
    would come only when the cycles are a quarter of that, tens of MiB, and would take long, in the middle of a step.

    Args:
        thresholds: `GARBAGE_OF_REQUESTS` or `GARBAGE_OF_STEPS`.
    """
    gc.collect()
    gc.freeze()
    # The threshold follows the count of the last full collection.
    gc.collect()
    gc.set_threshold(*thresholds)
    trim_heap()


def trim_heap() -> None:
    """Gives freed memory back, which glibc keeps between blocks in use: 50 MiB after loading weights."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def install_signal_handlers(stop_event: asyncio.Event) -> None:
    """Sets `stop_event` on SIGTERM and SIGINT; a second Ctrl-C ends the process at once."""
    loop = asyncio.get_running_loop()

    def request_stop(number: signal.Signals) -> None:
        _log.info("stopping", extra={"signal": number.name})
        stop_event.set()
        loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request_stop, number)


async def until_stopped(ended: Coroutine[Any, Any, None]) -> None:
    """Returns on SIGTERM or SIGINT; raises what `ended` raises if that comes first."""
    stop = asyncio.Event()
    install_signal_handlers(stop)
    stopped = asyncio.create_task(stop.wait())
    death = asyncio.create_task(ended)
    await asyncio.wait({stopped, death}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if death.done():
        death.result()
    death.cancel()


def raise_open_files_limit() -> None:
    """Raises the limit to the highest that the system allows this process.

    Shells and init systems often set 1,024, for old programs that cannot use more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse what they call the hard limit; then the old one stays.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if soft != hard:
            _log.info("limit of open files raised", extra={"before": soft, "now": hard})


def open_files_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def run(main: Coroutine[Any, Any, ResultT], *, prog: str = "paceline") -> ResultT:
    """Runs a service on uvloop to its end, with all the open files it may have; an error of ours is one line.

    A `ConfigError` gives exit status 2, any other `PacelineError` 1, Ctrl-C 130.
    """
    raise_open_files_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main)
    except ConfigError as error:
        exit_with_error(prog, error)
    except PacelineError as error:
        sys.stderr.write(f"{as_called(prog)}: error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _with(options: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    return list({**dict(_SERVER_OPTIONS), **dict(options)}.items())


async def _start_health_server(servicer: Any, host: str, port: int) -> grpc.aio.Server:
    """Serves health in plain text, for probes that have no certificate."""
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    _bind(server, host, port, None, way_out="--health-port")
    await server.start()
    return server


def _bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None,
    *,
    way_out: str = "--host or --port (0 picks a free one)",
) -> int:
    address = host_port(host, port)
    refusal = ConfigError(
        f"cannot listen on {address}: the port is in use or the address is not of this machine; "
        f"choose another with {way_out}"
    )
    try:
        if credentials is None:
            bound_port = server.add_insecure_port(address)
        else:
            bound_port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise refusal from error
    if bound_port == 0 or port not in (0, bound_port):
        raise refusal
    return bound_port
