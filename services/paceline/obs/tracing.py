"""Spans as the services see them: what they say costs next to nothing where nobody records it.

`Tracing` and `Span` stand here as they are when tracing is off, or a request is not sampled; what records and sends is
in `paceline.obs.otlp`, which is imported, and OpenTelemetry with it, only when traces are asked for. Spans belong to
the event loop: engine threads report times, and never call anything here.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

from prometheus_client import CollectorRegistry

from paceline.core.errors import ConfigError

# Header and gRPC metadata of the W3C trace context.
TRACEPARENT = "traceparent"

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]
NO_ATTRIBUTES: Attributes = {}


class Kind(enum.Enum):
    """Which side of a call a span stands for."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


class Span:
    """A span that nobody records; leaving it as a context manager ends it.

    Times are seconds of `time.monotonic`; None: now.

    Args:
        traceparent: What is handed on to others in its place: that a request is not sampled; empty: nothing.
    """

    __slots__ = ("traceparent",)

    recording = False

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent

    def child(
        self,
        name: str,
        *,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes = NO_ATTRIBUTES,
        start_s: float | None = None,
    ) -> Span:
        """Starts a span below this one."""
        del name, kind, attributes, start_s
        return self

    def rename(self, name: str) -> None:
        """Gives it the name that was not known at its start."""

    def set(self, attributes: Attributes) -> None:
        """Adds attributes."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at_s: float | None = None) -> None:
        """Adds an event."""

    def fail(self, error: BaseException) -> None:
        """Says what went wrong; that it was cancelled is no error."""

    def end(self, at_s: float | None = None) -> None:
        """Ends it; to be called once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends it, with the error if there is one."""


UNRECORDED = Span()


class Tracing:
    """Traces of one service; this one is off."""

    on = False

    def incoming(self, call: Any) -> str:
        """Returns the trace context that came with a gRPC call; empty: none.

        Args:
            call: The call's `grpc.aio.ServicerContext`.
        """
        del call
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
        """Starts a span below one of another process; without any it begins a trace, if it is sampled."""
        del name, kind, traceparent, attributes, start_s
        return UNRECORDED


OFF = Tracing()


@asynccontextmanager
async def open_tracing(
    endpoint: str, sample_ratio: float, *, role: str, replica_id: str, registry: CollectorRegistry
) -> AsyncIterator[Tracing]:
    """Records and sends spans while a block runs; what is left at its end is sent within a deadline.

    Args:
        endpoint: Where an OTLP collector takes spans over gRPC: `http://host:port`, or https; empty: off.
        sample_ratio: Share of the traces that begin here, from 0 to 1; others follow whoever began them.
        role: Of the service.
        replica_id: Which one.
        registry: Where lost spans are counted.

    Raises:
        ConfigError: The endpoint cannot be right, or OpenTelemetry is not installed.
    """
    if not endpoint:
        yield OFF
        return
    try:
        from paceline.obs.otlp import OtlpTracing
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install it with paceline[otel]"
        ) from error
    tracing = OtlpTracing(endpoint, sample_ratio, role=role, replica_id=replica_id, registry=registry)
    try:
        yield tracing
    finally:
        await tracing.close()
