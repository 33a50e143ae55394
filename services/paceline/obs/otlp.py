"""Records spans and sends them over OTLP, with OpenTelemetry's SDK; the only module that imports it.

If the collector is down, only spans are lost: they wait in a bounded queue, those without a place are dropped and
counted, and an outage is logged once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer
from prometheus_client import CollectorRegistry, Counter

import paceline
from paceline.core.errors import ConfigError

# Spans that wait to be sent, some kilobytes each; a batch at a time.
MAX_QUEUE, MAX_BATCH = 4096, 256
BATCH_INTERVAL_S = 1.0
# Longest time to send a batch, with retries; and to send everything that is left at the end.
EXPORT_TIMEOUT_S, FLUSH_TIMEOUT_S = 5.0, 3.0
# Rounds of a session that are kept; see `paceline.verifier.tracing`.
MAX_EVENTS = 128
MAX_ATTRIBUTE_CHARS = 1024
SCHEMES = ("http", "https", "grpc")

_log = logging.getLogger(__name__)


@asynccontextmanager
async def sending_spans(
    endpoint: str, sample_ratio: float, *, role: str, replica_id: str, registry: CollectorRegistry, zone: str = ""
) -> AsyncIterator[Tracer]:
    """Does the work of `paceline.obs.tracing.open_tracing`; spans that take too long at the end are dropped."""
    dropped = spans_dropped(registry)
    who = {
        "service.name": f"paceline-{role}",
        "service.version": paceline.__version__,
        "service.instance.id": replica_id,
        **({"cloud.availability_zone": zone} if zone else {}),
    }
    try:
        exporter = _PatientExporter(endpoint, dropped)
        provider = _provider(sample_ratio, who)
    except (InvalidCompressionValueException, ValueError, KeyError) as error:
        # The SDK has read its variables; its messages name them.
        raise ConfigError(f"OpenTelemetry's variables: {error}") from error
    provider.add_span_processor(_BoundedProcessor(exporter, dropped))
    try:
        yield provider.get_tracer("paceline", paceline.__version__)
    finally:
        closing = asyncio.create_task(asyncio.to_thread(provider.shutdown))
        await asyncio.wait({closing}, timeout=FLUSH_TIMEOUT_S)
        if not closing.done():
            exporter.give_up()
        await closing


def _provider(sample_ratio: float, who: Mapping[str, str]) -> TracerProvider:
    return TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create(who),
        span_limits=SpanLimits(max_events=MAX_EVENTS, max_span_attribute_length=MAX_ATTRIBUTE_CHARS),
        shutdown_on_exit=False,
    )


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
        # The event loop counts here, the sending thread in the exporter: each number has one writer.
        self._num_queued = 0

    def on_end(self, span: ReadableSpan) -> None:
        """Queues a span that has ended."""
        if self._num_queued - self._exporter.num_taken >= MAX_QUEUE:
            self._dropped.labels("queue_full").inc()
            return
        self._num_queued += 1
        super().on_end(span)


def spans_dropped(registry: CollectorRegistry) -> Counter:
    """Returns the counter of lost spans, which is shown while tracing is on."""
    meaning = "Spans that no collector got, while tracing is on: queue_full, not_taken."
    return Counter("paceline:spans_dropped", meaning, ("reason",), registry=registry)


class _PatientExporter(SpanExporter):
    """Sends batches; counts failed ones, and logs an outage once.

    Raises:
        ConfigError: The endpoint cannot be right.
    """

    def __init__(self, endpoint: str, dropped: Counter) -> None:
        address, insecure = _address_of(endpoint)
        # It would log every retry.
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
        self.give_up()


def _address_of(endpoint: str) -> tuple[str, bool]:
    """Returns `host:port` of a collector, and whether it uses plain text."""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in SCHEMES or not parts.hostname or port is None or parts.path.strip("/"):
        raise ConfigError(
            "--otlp-traces-endpoint, or else OTEL_EXPORTER_OTLP_ENDPOINT, must be http://host:port, or "
            f"https://host:port for TLS, got {endpoint!r}"
        )
    return parts.netloc.rpartition("@")[2], parts.scheme != "https"
