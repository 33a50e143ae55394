"""An API operation over HTTP: from a request to an answer or an error; nothing is raised to the server.

Bodies are read and parsed within bounds, and off the event loop where that takes long.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any, Self, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from paceline.core.errors import InvalidRequestError, PacelineError
from paceline.gateway.api.endpoints.request_trace import RequestTrace, traced_request
from paceline.gateway.http.body import FIELD, parse_json_object, read_body
from paceline.gateway.http.connection import WRITE, WRITE_NOW
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.http.response import (
    IGNORED_FIELDS,
    IGNORED_TOOLS,
    OPENAI_ERRORS,
    ErrorForm,
    Exchange,
    request_id,
    until_disconnect,
)
from paceline.obs.tracing import OFF, TRACEPARENT, Tracer
from paceline.service.fair_shares import FairThreads, Shares, current_caller

Work = Coroutine[Any, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A running request."""

    request: Request
    exchange: Exchange
    trace: RequestTrace


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An ASGI application.

    Attributes:
        handle: Reads the request; returns the work that answers it, which ends early when the client leaves.
        count_error: Called with the error that ends a request.
        id_prefix: Prefix of request names; empty: they get none.
        errors: How the API reports errors.
        tracer: Records the spans of requests, if tracing is on.
        operation: Name of these spans.
        ping_s: Longest silence of a stream; 0: any.
    """

    handle: Callable[[Call], Awaitable[Work]]
    _: KW_ONLY
    count_error: Callable[[Exception], None] = lambda _: None
    id_prefix: str = ""
    errors: ErrorForm = OPENAI_ERRORS
    tracer: Tracer = OFF
    operation: str = ""
    ping_s: float = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        given_id = request_id(request.headers)
        with traced_request(self.tracer, self.operation, request.headers.get(TRACEPARENT, ""), given_id) as trace:
            exchange = Exchange(
                send,
                trace.fail,
                given_id=given_id,
                own_id=self.id_prefix and f"{self.id_prefix}{uuid.uuid4().hex}",
                form=self.errors,
                write_now=scope["extensions"][WRITE_NOW][WRITE],
                ping_s=self.ping_s,
            )
            try:
                work = await self.handle(Call(request=request, exchange=exchange, trace=trace))
                await until_disconnect(receive, work)
            except ClientDisconnect:
                # It left while it sent its body: no error of anybody, and nobody is there to get an answer.
                return
            except Exception as error:  # noqa: BLE001 - the edge: the client gets an answer, whatever happens
                self.count_error(error)
                await exchange.fail(error)
            finally:
                exchange.close()


ReadT = TypeVar("ReadT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyReader:
    """Reads request bodies.

    Attributes:
        max_bytes: Largest body accepted.
        timeout_s: Time for all of it, in seconds.
        reading: Bytes of all bodies that are read at the moment, at either door.
        workers: Parse and understand them.
        strict_fields: Whether unknown fields are refused instead of ignored.
    """

    max_bytes: int
    timeout_s: float
    reading: Shares
    workers: Workers
    strict_fields: bool

    async def read(
        self,
        call: Call,
        understand: Callable[..., ReadT],
        prepare: Callable[[dict[str, Any]], Awaitable[Sequence[Any] | None]] | None = None,
    ) -> ReadT:
        """Returns what `understand` makes of a body; headers of the answer will name what was ignored.

        Args:
            call: Call of the body.
            understand: Takes the JSON object and the collection of unknown fields.
            prepare: Fetches what `understand` takes as its first argument; None: it takes none.

        Raises:
            InvalidRequestError: The body is too large, too slow or no JSON object, or is refused by `understand`.
            OverloadedError: There is no room to read it.
        """
        unknown = UnknownFields(strict=self.strict_fields)
        with self.reading.take(0, current_caller()) as held:
            raw = await read_body(
                call.request.stream(),
                call.request.headers,
                held.resize,
                max_bytes=self.max_bytes,
                timeout_s=self.timeout_s,
            )
            try:
                understood = await self._understood(call, raw, understand, unknown, prepare)
            except PacelineError:
                self._report(unknown, call.exchange)
                raise
            self._report(unknown, call.exchange)
            return understood

    async def _understood(
        self,
        call: Call,
        raw: bytearray,
        understand: Callable[..., ReadT],
        unknown: UnknownFields,
        prepare: Callable[[dict[str, Any]], Awaitable[Sequence[Any] | None]] | None,
    ) -> ReadT:
        small = len(raw) <= MAX_INLINE_BYTES
        fields = await self.workers.run(partial(parse_json_object, raw), small=small)
        call.trace.asked(fields)
        if prepare is not None:
            prepared = await prepare(fields)
            understand = partial(understand, prepared)
            # Fetched texts may be long.
            small = small and not any(prepared or ())
        work = partial(understand, fields, unknown)
        try:
            return await self.workers.run(work, small=small)
        except RecursionError:
            # The parser of JSON goes deeper than templates and schemas can be followed.
            raise InvalidRequestError(FIELD, "is nested too deeply") from None

    def _report(self, unknown: UnknownFields, exchange: Exchange) -> None:
        """Names what was ignored; not called after a cancellation, when a thread may still add to it."""
        named = {IGNORED_FIELDS: unknown.header, IGNORED_TOOLS: unknown.tools_header}
        exchange.headers.update({header: names for header, names in named.items() if names})


NUM_THREADS = 2
LONGEST_WAIT_S = 30.0
# Larger requests are read in a thread, so that no stream waits for a tokenizer.
MAX_INLINE_BYTES = 4 * 1024

ResultT = TypeVar("ResultT")


class Workers:
    """Runs functions of requests; a context manager that ends the threads."""

    def __init__(self) -> None:
        self._reading = FairThreads(NUM_THREADS, "requests being read", longest_wait_s=LONGEST_WAIT_S)

    async def run(self, function: Callable[[], ResultT], *, small: bool) -> ResultT:
        """Returns the result of a function, in a thread unless it is quick; either way in the request's context.

        Args:
            function: Reads a request, or a part of it.
            small: Whether it reads so little that no thread is needed.

        Raises:
            OverloadedError: It has waited too long.
        """
        if small:
            return function()
        return await self._reading.run(function, current_caller().name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.close()
