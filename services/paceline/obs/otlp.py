"""Records spans and sends them over OTLP, with OpenTelemetry's SDK; the only module that imports it.

If the collector is down, only spans are lost: they wait in a bounded queue, which drops the oldest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer

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
EXPORTER_LOGGER = "opentelemetry.exporter.otlp"


@asynccontextmanager
async def sending_spans(
    endpoint: str, sample_ratio: float, *, role: str, replica_id: str, zone: str = ""
) -> AsyncIterator[Tracer]:
    """Does the work of `paceline.obs.tracing.open_tracing`; spans that take too long at the end are dropped."""
    who = {
        "service.name": f"paceline-{role}",
        "service.version": paceline.__version__,
        "service.instance.id": replica_id,
        **({"cloud.availability_zone": zone} if zone else {}),
    }
    try:
        address, insecure = _address_of(endpoint)
        exporter = OTLPSpanExporter(address, insecure=insecure, timeout=EXPORT_TIMEOUT_S)
        provider = _provider(sample_ratio, who)
    except (InvalidCompressionValueException, ValueError, KeyError) as error:
        # The SDK has read its variables; its messages name them.
        raise ConfigError(f"OpenTelemetry's variables: {error}") from error
    # The exporter logs an error of lost batches, every 20 s at most, and would log a warning for each retry.
    logging.getLogger(EXPORTER_LOGGER).setLevel(logging.ERROR)
    provider.add_span_processor(
        BatchSpanProcessor(
            exporter,
            max_queue_size=MAX_QUEUE,
            schedule_delay_millis=1000 * BATCH_INTERVAL_S,
            max_export_batch_size=MAX_BATCH,
        )
    )
    try:
        yield provider.get_tracer("paceline", paceline.__version__)
    finally:
        closing = asyncio.create_task(asyncio.to_thread(provider.shutdown))
        await asyncio.wait({closing}, timeout=FLUSH_TIMEOUT_S)
        if not closing.done():
            exporter.shutdown(timeout_millis=0)
        await closing


def _provider(sample_ratio: float, who: Mapping[str, str]) -> TracerProvider:
    return TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        resource=Resource.create(who),
        span_limits=SpanLimits(max_events=MAX_EVENTS, max_span_attribute_length=MAX_ATTRIBUTE_CHARS),
        shutdown_on_exit=False,
    )


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
