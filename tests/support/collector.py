"""An OTLP collector of a few lines that keeps what it is sent."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """One span as it came over the wire; an event is its name, its time and its attributes."""

    service: str
    zone: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]
    events: tuple[tuple[str, int, dict[str, Any]], ...] = field(repr=False)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps spans in the order in which they came."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._came = asyncio.Condition()

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Adds a batch."""
        del context
        async with self._came:
            for resource in request.resource_spans:
                named = _values(resource.resource.attributes)
                service, zone = named["service.name"], named.get("cloud.availability_zone", "")
                self.spans += [_received(service, zone, span) for scope in resource.scope_spans for span in scope.spans]
            self._came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        """The spans of one trace, as they began."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start_ns)

    async def trace(self, trace_id: str, *names: str) -> dict[str, ReceivedSpan]:
        """The spans of a trace by name, once all of these have come; a name that comes twice is an error."""
        spans = await self.until(lambda: self.of_trace(trace_id), lambda got: set(names) <= {each.name for each in got})
        by_name = {span.name: span for span in spans}
        assert len(by_name) == len(spans), f"two spans of one name: {spans}"
        return by_name

    async def until(
        self, look: Callable[[], list[ReceivedSpan]], enough: Callable[[list[ReceivedSpan]], bool]
    ) -> list[ReceivedSpan]:
        """What `look` gives, once it is enough."""
        async with asyncio.timeout(WAIT_S), self._came:
            await self._came.wait_for(lambda: enough(look()))
            return look()


@asynccontextmanager
async def running_collector() -> AsyncIterator[tuple[str, Collector]]:
    """A collector on a free port while a block runs; yields its endpoint."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    bound = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"http://127.0.0.1:{bound}", collector
    finally:
        await server.stop(0)


def new_traceparent(*, sampled: bool = True) -> tuple[str, str]:
    """The id of a new trace, and what a caller sends to have its request in it."""
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-{secrets.token_hex(8)}-{'01' if sampled else '00'}"


def _received(service: str, zone: str, span: trace_pb2.Span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        zone=zone,
        name=span.name,
        kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        attributes=_values(span.attributes),
        events=tuple((event.name, event.time_unix_nano, _values(event.attributes)) for event in span.events),
    )


def _values(pairs: Sequence[common_pb2.KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: common_pb2.AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)
