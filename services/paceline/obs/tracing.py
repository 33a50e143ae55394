"""Spans for the services, of OpenTelemetry's API; they are recorded only if an endpoint for traces is set.

`paceline.obs.otlp` records and sends them; it is imported only then, and OpenTelemetry's SDK with it. Spans belong to
the event loop: engines report times, and never call anything here.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from heapq import heappop, heappush
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN as INVALID_SPAN
from opentelemetry.trace import NoOpTracer, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Span as Span
from opentelemetry.trace import SpanKind as SpanKind
from opentelemetry.trace import Tracer as Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from paceline.core.errors import (
    ConfigError,
    EndsEnginesError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ResumeMismatchError,
    SessionNotFoundError,
    StaleEpochError,
    UnauthenticatedError,
    shortened,
)
from paceline.obs.attributes import CANCELLED, ERROR_TYPE
from paceline.obs.log import current_trace_id

# Header and gRPC metadata of the W3C trace context.
TRACEPARENT = "traceparent"
OFF: Tracer = NoOpTracer()
MAX_MESSAGE_CHARS = 1024
# Events of a kind that a span shows: spread over its time, and the slowest; `paceline.obs.otlp` keeps that many.
EVENLY, SLOWEST = 100, 20
_VARIABLES = "OTEL_EXPORTER_OTLP_"
# Help of the setting that names another endpoint.
ENDPOINT_HELP = (
    "OTLP collector that takes traces over gRPC, http://host:port or https://host:port; empty: the one in "
    f"{_VARIABLES}ENDPOINT, or no traces."
)

# Status codes that HTTP answers with 4xx: OpenTelemetry's conventions leave the status of a server's span unset then.
OF_CLIENTS = (
    EndsEnginesError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    ResumeMismatchError,
    SessionNotFoundError,
    StaleEpochError,
    UnauthenticatedError,
)
Attributes = Mapping[str, AttributeValue]
_Event = tuple[int, Attributes]

_PROPAGATOR = TraceContextTextMapPropagator()
_log = logging.getLogger(__name__)


def collector(environ: Mapping[str, str]) -> str:
    """The endpoint that OpenTelemetry's variables name for traces; empty: none, or one that takes no gRPC."""
    protocol, named = (
        environ.get(f"{_VARIABLES}TRACES_{name}") or environ.get(f"{_VARIABLES}{name}")
        for name in ("PROTOCOL", "ENDPOINT")
    )
    takes_grpc = (protocol or "grpc") == "grpc" and environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp"
    return named if named and takes_grpc else ""


def incoming(call: Any) -> str:
    """Returns the trace context that came with a gRPC call, its `grpc.aio.ServicerContext`; empty: none."""
    for name, value in call.invocation_metadata() or ():
        if name == TRACEPARENT and isinstance(value, str):
            return value
    return ""


def start_span(
    tracer: Tracer,
    name: str,
    *,
    parent: str | Span = "",
    kind: SpanKind = SpanKind.SERVER,
    attributes: Attributes | None = None,
    start_ns: int | None = None,
) -> Span:
    """Starts a span.

    Args:
        tracer: May record it; `OFF` passes on no trace context either.
        name: The span's name.
        parent: The span above it, or a trace context from another process. An unreadable one is ignored, as W3C says;
            without a parent a new trace begins, if it is sampled.
        kind: The side of the call.
        attributes: Its first attributes.
        start_ns: Unix time; None: now.
    """
    if tracer is OFF:
        return INVALID_SPAN
    context = Context()
    if isinstance(parent, Span):
        context = set_span_in_context(parent, context)
    elif parent:
        context = _PROPAGATOR.extract({TRACEPARENT: parent}, context)
    return tracer.start_span(name, context, kind, attributes, start_time=start_ns)


def traceparent_of(span: Span) -> str:
    """Returns the trace context to pass on, also for an unsampled request; empty: none."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def fail(span: Span, error: BaseException) -> None:
    """Records an error in a span. A cancellation is not an error, and a client's mistake is none of a server's span."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        span.set_attribute(CANCELLED, True)
        return
    span.set_attribute(ERROR_TYPE, type(error).__name__)
    if getattr(span, "kind", None) is SpanKind.SERVER and isinstance(error, OF_CLIENTS):
        return
    span.set_status(Status(StatusCode.ERROR, shortened(str(error), MAX_MESSAGE_CHARS)))


class SampledEvents:
    """A bounded sample of events: evenly spread ones, of which every second is dropped when full, and the slowest."""

    def __init__(self, evenly: int = EVENLY, slowest: int = SLOWEST) -> None:
        self._even: list[tuple[int, _Event]] = []
        self._limit = evenly
        self._num_slowest = slowest
        # A heap: the fastest of the slow ones first. Numbers tell events of the same time apart.
        self._slow: list[tuple[float, int, _Event]] = []
        self._num_seen = 0
        self._stride = 1

    @property
    def kept(self) -> list[_Event]:
        """The events, oldest first: Unix nanoseconds, and attributes."""
        found = dict(self._even) | {number: event for _, number, event in self._slow}
        return [found[number] for number in sorted(found)]

    @property
    def num_left_out(self) -> int:
        """Events that were seen and are not kept."""
        return self._num_seen - len(self.kept)

    def add(self, at_ns: int, took_s: float, attributes: Attributes) -> None:
        """Adds the next event: when it was in Unix nanoseconds, the seconds that it took, and its attributes."""
        number, event = self._num_seen, (at_ns, attributes)
        if number % self._stride == 0:
            if len(self._even) == self._limit:
                del self._even[1::2]
                self._stride *= 2
            self._even.append((number, event))
        heappush(self._slow, (took_s, number, event))
        if len(self._slow) > self._num_slowest:
            heappop(self._slow)
        self._num_seen += 1

    def add_to(self, span: Span, name: str) -> None:
        """Adds those that are kept to a span."""
        for at_ns, attributes in self.kept:
            span.add_event(name, attributes, at_ns)


@contextmanager
def ended(span: Span) -> Iterator[Span]:
    """Ends a span with a block, and with its error if there is one; the task's log lines name a recorded trace."""
    if span.is_recording():
        current_trace_id.set(f"{span.get_span_context().trace_id:032x}")
    try:
        yield span
    except BaseException as error:
        fail(span, error)
        raise
    finally:
        span.end()


@asynccontextmanager
async def open_tracing(
    endpoint: str, sample_ratio: float, *, role: str, replica_id: str, zone: str = ""
) -> AsyncIterator[Tracer]:
    """Records and sends spans while a block runs; those left at its end are sent within a deadline.

    Args:
        endpoint: Where an OTLP collector takes spans over gRPC: `http://host:port`, or https; empty: what
            OpenTelemetry's variables name, or off.
        sample_ratio: Share of traces that begin here, from 0 to 1; others follow their origin.
        role: The service's role.
        replica_id: The service's replica id.
        zone: Where the service runs; empty: unknown.

    Raises:
        ConfigError: The endpoint or one of OpenTelemetry's variables cannot be right, or its SDK is not installed.
    """
    named = endpoint or collector(os.environ)
    if not named:
        yield OFF
        return
    try:
        from paceline.obs.otlp import sending_spans
    except ImportError as error:
        if not endpoint:
            # The variable may be meant for the other programs of a machine.
            _log.warning("no traces: OTEL_EXPORTER_OTLP_ENDPOINT is set, and paceline[otel] is not installed")
            yield OFF
            return
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install it with paceline[otel]"
        ) from error
    async with sending_spans(named, sample_ratio, role=role, replica_id=replica_id, zone=zone) as tracer:
        yield tracer
