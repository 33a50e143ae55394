"""An OTLP collector of a few lines: `python -m loadtest collector` shows every trace that it is sent as a tree.

Tests and the bench `tracing` use it too. It is for looking at a few traces, and keeps no file.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from loadtest.flags import bench_parser

OTLP_PORT = 4317
WAIT_S = 30.0
# A trace that was sent nothing for so long is shown.
QUIET_S = 3.0
NS_PER_MS = 1e6
# Events of a span that a tree shows.
SHOWN_EVENTS = 3


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
        self.num_bytes = 0
        self.heard_s: dict[str, float] = {}
        self._came = asyncio.Condition()

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Takes in a batch."""
        del context
        async with self._came:
            for resource in request.resource_spans:
                said = _values(resource.resource.attributes)
                service, zone = said["service.name"], said.get("cloud.availability_zone", "")
                received = [_received(service, zone, span) for scope in resource.scope_spans for span in scope.spans]
                self.spans += received
                self.heard_s.update(dict.fromkeys((span.trace_id for span in received), time.monotonic()))
            self.num_bytes += request.ByteSize()
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
async def running_collector(port: int = 0) -> AsyncIterator[tuple[str, Collector]]:
    """A collector while a block runs, on a free port unless one is given; yields its endpoint."""
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"http://127.0.0.1:{bound}", collector
    finally:
        await server.stop(0)


def new_traceparent(*, sampled: bool = True) -> tuple[str, str]:
    """The id of a new trace, and what a caller sends to have its request in it."""
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-{secrets.token_hex(8)}-{'01' if sampled else '00'}"


def tree(spans: Sequence[ReceivedSpan]) -> str:
    """One trace as text: a line a span, with its start and length in milliseconds, and what is known of it."""
    origin_ns = min(span.start_ns for span in spans)
    known = {span.span_id for span in spans}
    roots = [span for span in spans if span.parent_id not in known]
    lines = [f"trace {spans[0].trace_id}"]
    for root in roots:
        lines += _branch(root, spans, origin_ns, "")
    return "\n".join(lines)


def _branch(span: ReceivedSpan, spans: Sequence[ReceivedSpan], origin_ns: int, indent: str) -> Iterator[str]:
    start_ms, length_ms = (span.start_ns - origin_ns) / NS_PER_MS, (span.end_ns - span.start_ns) / NS_PER_MS
    failed = " FAILED" if span.failed else ""
    yield f"{indent}{span.name} [{span.service}] at {start_ms:.1f} ms for {length_ms:.1f} ms{failed}"
    yield from (f"{indent}    {key} = {_short(value)}" for key, value in sorted(span.attributes.items()))
    for name, at_ns, attributes in span.events[:SHOWN_EVENTS]:
        told = ", ".join(f"{key} = {_short(value)}" for key, value in attributes.items())
        yield f"{indent}    {name} at {(at_ns - origin_ns) / NS_PER_MS:.1f} ms: {told}"
    if len(span.events) > SHOWN_EVENTS:
        yield f"{indent}    ... and {len(span.events) - SHOWN_EVENTS} events more"
    for child in sorted((each for each in spans if each.parent_id == span.span_id), key=lambda each: each.start_ns):
        yield from _branch(child, spans, origin_ns, indent + "  ")


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def main() -> None:
    """Collects until Ctrl-C."""
    parser = bench_parser("collector", __doc__)
    parser.add_argument("--port", type=int, default=OTLP_PORT, help=f"port; 0 picks a free one (default {OTLP_PORT})")
    parser.add_argument("--count", action="store_true", help="show no trees; count, and tell in one line at the end")
    asyncio.run(collect(parser.parse_args()))


async def collect(arguments: argparse.Namespace) -> None:
    """Collects until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running_collector(arguments.port) as (endpoint, collector):
        print(endpoint, flush=True)
        while not stop.is_set():
            if not arguments.count:
                _show_quiet_ones(collector)
            try:
                async with asyncio.timeout(0.5):
                    await stop.wait()
            except TimeoutError:
                continue
    if arguments.count:
        traces = {span.trace_id for span in collector.spans}
        print(json.dumps({"spans": len(collector.spans), "traces": len(traces), "bytes": collector.num_bytes}))


def _show_quiet_ones(collector: Collector) -> None:
    now_s = time.monotonic()
    quiet = [trace_id for trace_id, heard_s in collector.heard_s.items() if now_s - heard_s > QUIET_S]
    for trace_id in quiet:
        print(tree(collector.of_trace(trace_id)), flush=True)
        del collector.heard_s[trace_id]
        collector.spans = [span for span in collector.spans if span.trace_id != trace_id]


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
