"""Records spans with OpenTelemetry's SDK and sends them over OTLP; the only module that imports it.

A collector that is away costs spans and nothing else: they wait in a bounded queue, what finds no place there is
dropped and counted, and an outage is told once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace import Tracer as SdkTracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter

import paceline
from paceline.core.errors import ConfigError, shortened
from paceline.obs.attributes import CANCELLED, ERROR_TYPE
from paceline.obs.log import current_trace_id
from paceline.obs.tracing import NO_ATTRIBUTES, TRACEPARENT, Attributes, Kind, Span, Tracing

# Spans that wait to be sent, some kilobytes each; a batch at a time.
MAX_QUEUE, MAX_BATCH = 4096, 256
BATCH_INTERVAL_S = 1.0
# Longest that sending a batch takes, tries anew included; and the whole of what is left at the end.
EXPORT_TIMEOUT_S, FLUSH_TIMEOUT_S = 5.0, 3.0
# Rounds of a session that are kept; see `paceline.verifier.tracing`.
MAX_EVENTS = 128
MAX_ATTRIBUTE_CHARS = 1024
NS_PER_S = 1e9
SCHEMES = ("http", "https", "grpc")

_KINDS = {Kind.SERVER: SpanKind.SERVER, Kind.CLIENT: SpanKind.CLIENT, Kind.INTERNAL: SpanKind.INTERNAL}
_PROPAGATOR = TraceContextTextMapPropagator()
_log = logging.getLogger(__name__)


class OtlpTracing(Tracing):
    """Traces that are sent to a collector; see `paceline.obs.tracing.open_tracing`."""

    on = True

    def __init__(
        self, endpoint: str, sample_ratio: float, *, role: str, replica_id: str, registry: CollectorRegistry
    ) -> None:
        dropped = Counter(
            "paceline:spans_dropped",
            "Spans that no collector got, by reason.",
            ("reason",),
            registry=registry,
        )
        self._exporter = _PatientExporter(endpoint, dropped)
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=Resource.create(
                {
                    "service.name": f"paceline-{role}",
                    "service.version": paceline.__version__,
                    "service.instance.id": replica_id,
                }
            ),
            span_limits=SpanLimits(max_events=MAX_EVENTS, max_span_attribute_length=MAX_ATTRIBUTE_CHARS),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(_BoundedProcessor(self._exporter, dropped))
        self._tracer = self._provider.get_tracer("paceline", paceline.__version__)

    def incoming(self, call: Any) -> str:
        """See `Tracing`."""
        for name, value in call.invocation_metadata() or ():
            if name == TRACEPARENT and isinstance(value, str):
                return value
        return ""

    def start(
        self,
        name: str,
        *,
        kind: Kind = Kind.SERVER,
        traceparent: str = "",
        attributes: Attributes = NO_ATTRIBUTES,
        start_s: float | None = None,
    ) -> Span:
        """See `Tracing`; a context that cannot be read is none, as W3C has it."""
        parent = _PROPAGATOR.extract({TRACEPARENT: traceparent}, Context()) if traceparent else Context()
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name, parent, _KINDS[kind], dict(attributes), start_time=_unix_ns(start_s, offset_ns)
        )
        context = span.get_span_context()
        return _RecordedSpan(span, self._tracer, offset_ns) if span.is_recording() else Span(_traceparent(context))

    async def close(self) -> None:
        """Sends what is left, and gives it up when that takes too long."""
        closing = asyncio.create_task(asyncio.to_thread(self._provider.shutdown))
        await asyncio.wait({closing}, timeout=FLUSH_TIMEOUT_S)
        if not closing.done():
            self._exporter.give_up()
        await closing


class _RecordedSpan(Span):
    """A sampled span, and the distance from monotonic to wall time that its trace has in this process."""

    __slots__ = ("_offset_ns", "_span", "_tracer")

    recording = True

    def __init__(self, span: SdkSpan, tracer: SdkTracer, offset_ns: int) -> None:
        super().__init__(_traceparent(span.get_span_context()))
        self._span = span
        self._tracer = tracer
        self._offset_ns = offset_ns

    def child(
        self,
        name: str,
        *,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes = NO_ATTRIBUTES,
        start_s: float | None = None,
    ) -> Span:
        parent = set_span_in_context(self._span, Context())
        started_ns = _unix_ns(start_s, self._offset_ns)
        span = self._tracer.start_span(name, parent, _KINDS[kind], dict(attributes), start_time=started_ns)
        return _RecordedSpan(span, self._tracer, self._offset_ns)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(dict(attributes))

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at_s: float | None = None) -> None:
        self._span.add_event(name, dict(attributes), _unix_ns(at_s, self._offset_ns))

    def fail(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self._span.set_attribute(CANCELLED, True)
            return
        self._span.set_attribute(ERROR_TYPE, type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR, shortened(str(error), MAX_ATTRIBUTE_CHARS)))

    def end(self, at_s: float | None = None) -> None:
        self._span.end(_unix_ns(at_s, self._offset_ns))

    def __enter__(self) -> Self:
        current_trace_id.set(f"{self._span.get_span_context().trace_id:032x}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.end()


class _BoundedProcessor(BatchSpanProcessor):
    """A batch processor that refuses spans itself, and counts them, before the SDK's own queue overflows."""

    def __init__(self, exporter: _PatientExporter, dropped: Counter) -> None:
        super().__init__(
            exporter,
            max_queue_size=2 * MAX_QUEUE,
            schedule_delay_millis=1000 * BATCH_INTERVAL_S,
            max_export_batch_size=MAX_BATCH,
        )
        self._exporter = exporter
        self._dropped = dropped
        # Counted here by the event loop and there by the sending thread: each number has one writer.
        self._num_queued = 0

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span that has ended."""
        if self._num_queued - self._exporter.num_taken >= MAX_QUEUE:
            self._dropped.labels("queue_full").inc()
            return
        self._num_queued += 1
        super().on_end(span)


class _PatientExporter(SpanExporter):
    """Sends batches; counts those that fail, and tells of an outage once.

    Raises:
        ConfigError: The endpoint cannot be right.
    """

    def __init__(self, endpoint: str, dropped: Counter) -> None:
        address, insecure = _address_of(endpoint)
        # It would tell of every try.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        self._inner = OTLPSpanExporter(address, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
        self._address = address
        self._dropped = dropped
        self._failing = False
        self.num_taken = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Sends a batch, in the SDK's thread."""
        self.num_taken += len(spans)
        result = self._inner.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self._dropped.labels("not_taken").inc(len(spans))
        if failed and not self._failing:
            _log.warning("spans are lost: the collector does not take them", extra={"collector": self._address})
        elif self._failing and not failed:
            _log.info("the collector takes spans again", extra={"collector": self._address})
        self._failing = failed
        return result

    def give_up(self) -> None:
        """Ends what is being sent, and everything after it."""
        self._inner.shutdown(timeout_millis=0)

    def shutdown(self) -> None:
        """Ends the connection."""
        self.give_up()


def _address_of(endpoint: str) -> tuple[str, bool]:
    """Returns `host:port` of a collector, and whether it is reached in plain text."""
    parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in SCHEMES or not parts.hostname or port is None or parts.path.strip("/"):
        raise ConfigError(
            f"--otlp-traces-endpoint must be http://host:port, or https://host:port for TLS, got {endpoint!r}"
        )
    return parts.netloc.rpartition("@")[2], parts.scheme != "https"


def _unix_ns(at_s: float | None, offset_ns: int) -> int | None:
    return None if at_s is None else int(at_s * NS_PER_S) + offset_ns


def _traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
