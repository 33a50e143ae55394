"""The two completion endpoints as ASGI applications: from bytes of a body to bytes of an answer.

What they say stands in `paceline.gateway.answers`, how it is sent in `paceline.gateway.http_response`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from paceline.core.errors import InvalidRequestError
from paceline.gateway.answers import Answer, Json
from paceline.gateway.api import ChatBody, CommonBody, CompletionBody, StreamOptions, parse_body
from paceline.gateway.body import parse_json_object, read_body
from paceline.gateway.callers import current_caller
from paceline.gateway.choices import chat_sessions, completion_sessions
from paceline.gateway.event_ids import HEADER, EventId
from paceline.gateway.fair_shares import Shares
from paceline.gateway.http_response import DONE, JSON_HEADERS, STREAM_HEADERS, Exchange, to_json
from paceline.gateway.merge_streams import merged, until_disconnect
from paceline.gateway.request_trace import RequestTrace, traced_request
from paceline.gateway.requests import SessionRequest
from paceline.gateway.session_output import Ending, Event, Piece
from paceline.gateway.sessions import Sessions
from paceline.gateway.take_over import Resumption
from paceline.gateway.workers import Workers
from paceline.obs.attributes import CHAT, TEXT_COMPLETION
from paceline.obs.tracing import TRACEPARENT, Tracer

# Larger bodies are read in a thread, so that no stream waits for a tokenizer.
MAX_INLINE_BYTES = 4 * 1024

Events = AsyncGenerator[tuple[int, Event], None]
ReadT = TypeVar("ReadT")


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Bounds of a request body.

    Attributes:
        max_bytes: Largest body accepted.
        timeout_s: Time for all of it, in seconds.
        reading: Bytes of all bodies that are read at the moment, at either door.
    """

    max_bytes: int
    timeout_s: float
    reading: Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """A checked request; its body, which may be long, is given up."""

    stream: bool
    options: StreamOptions
    requests: Sequence[SessionRequest]
    answer: Answer

    @property
    def place(self) -> EventId | None:
        """Where its stream begins; None where nobody asked for places, or could go on from them."""
        first = self.requests[0]
        asked = first.resumed or self.options.include_event_ids
        named = asked and len(self.requests) == 1 and first.resumable
        return EventId(session_id=first.session_id) if named else None


class CompletionEndpoint:
    """POST /v1/completions or /v1/chat/completions."""

    def __init__(
        self,
        sessions: Sessions,
        resumption: Resumption,
        limits: BodyLimits,
        workers: Workers,
        tracer: Tracer,
        *,
        chat: bool,
    ) -> None:
        self._sessions = sessions
        self._resumption = resumption
        self._workers = workers
        self._limits = limits
        self._tracer = tracer
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; errors become error objects, nothing is raised to the server."""
        request = Request(scope, receive)
        operation = CHAT if self._chat else TEXT_COMPLETION
        with traced_request(self._tracer, operation, request.headers.get(TRACEPARENT, "")) as trace:
            exchange = Exchange(send, trace.fail)
            try:
                with self._sessions.errors_counted():
                    work = await self._work(request, exchange, trace)
                await until_disconnect(receive, work)
            except Exception as error:  # noqa: BLE001 - the edge: whatever happens, the client is told
                await exchange.fail(error)

    async def _work(self, request: Request, exchange: Exchange, trace: RequestTrace) -> Coroutine[Any, Any, None]:
        """Reads a request; returns what answers it."""
        last_event_id = request.headers.get(HEADER)
        if last_event_id is None:
            return self._answer(await self._read(request, partial(self._order, trace)), exchange, trace)
        place = EventId.parse(last_event_id)
        return self._go_on(place, await self._read(request, self._options), exchange, trace)

    async def _read(self, request: Request, understand: Callable[[bytearray], ReadT]) -> ReadT:
        with self._limits.reading.take(0, current_caller()) as held:
            raw = await read_body(
                request.stream(),
                request.headers.get("content-length"),
                held,
                max_bytes=self._limits.max_bytes,
                timeout_s=self._limits.timeout_s,
            )
            if len(raw) <= MAX_INLINE_BYTES:
                return understand(raw)
            return await self._workers.run(partial(understand, raw))

    def _options(self, raw: bytearray) -> StreamOptions:
        """Returns how a stream is to go on; all else that a body says is known of the session."""
        body = parse_body(ChatBody if self._chat else CompletionBody, parse_json_object(raw))
        if not body.stream or body.n != 1:
            raise InvalidRequestError(HEADER, "goes on with a stream of one choice: stream must be true, n 1")
        return body.stream_options or StreamOptions()

    def _order(self, trace: RequestTrace, raw: bytearray) -> _Order:
        fields = parse_json_object(raw)
        request_id = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        body: CommonBody
        if self._chat:
            body = chat = parse_body(ChatBody, fields)
            model = self._sessions.model(body.model)
            requests = chat_sessions(chat, model, request_id)
        else:
            body = completion = parse_body(CompletionBody, fields)
            model = self._sessions.model(body.model)
            requests = completion_sessions(completion, model, request_id)
        requests = [replace(request, api_key=current_caller().name, span=trace.span) for request in requests]
        trace.asked(requests, request_id, body.n)
        options = body.stream_options or StreamOptions()
        answer = self._empty_answer(requests, request_id, body.n)
        return _Order(stream=body.stream, options=options, requests=requests, answer=answer)

    def _empty_answer(self, requests: Sequence[SessionRequest], request_id: str, samples_per_prompt: int) -> Answer:
        return Answer(
            chat=self._chat,
            request_id=request_id,
            created_s=int(time.time()),
            model_name=requests[0].model.identity.name,
            requests=requests,
            samples_per_prompt=samples_per_prompt,
        )

    async def _answer(self, order: _Order, exchange: Exchange, trace: RequestTrace) -> None:
        try:
            with self._sessions.errors_counted(), self._sessions.admitted(len(order.requests), current_caller()):
                await self._run(order, exchange, trace)
        except Exception as error:  # noqa: BLE001 - told to the client while the session still counts as running
            await exchange.fail(error)

    async def _go_on(self, place: EventId, options: StreamOptions, exchange: Exchange, trace: RequestTrace) -> None:
        """Streams what follows a place in the stream of a session."""
        try:
            with self._sessions.errors_counted(), self._sessions.admitted(1, current_caller()):
                caller = current_caller().name
                session = await self._resumption.claim(place.session_id, place.offset, place.digest, caller)
                requests = [replace(session, span=trace.span)]
                request_id = session.session_id.rpartition("-")[0]
                trace.asked(requests, request_id, 1)
                answer = self._empty_answer(requests, request_id, 1)
                await self._run(_Order(stream=True, options=options, requests=requests, answer=answer), exchange, trace)
        except Exception as error:  # noqa: BLE001 - told to the client while the session still counts as running
            await exchange.fail(error)

    async def _run(self, order: _Order, exchange: Exchange, trace: RequestTrace) -> None:
        runs = [trace.watch(self._sessions.run(request)) for request in order.requests]
        async with aclosing(merged(runs)) as events:
            if order.stream:
                await _stream(order, events, exchange)
            else:
                await _collect(order, events, exchange)


async def _collect(order: _Order, events: Events, exchange: Exchange) -> None:
    answer = order.answer
    async for index, event in events:
        if isinstance(event, Ending):
            answer.add_ending(index, event)
        else:
            answer.add_piece(index, event)
    body = to_json(answer.whole())
    await exchange.begin(200, {**JSON_HEADERS, "content-length": str(len(body))})
    await exchange.write(body, last=True)


async def _stream(order: _Order, events: Events, exchange: Exchange) -> None:
    answer = order.answer
    options = order.options
    place = order.place
    begun = False
    async for index, event in events:
        # Nothing is sent before the first event, so that a refusal of the verifier still has its own status.
        if not begun:
            begun = True
            await exchange.begin(200, STREAM_HEADERS)
            for chunk in answer.opening_chunks():
                await exchange.event(_with_usage(chunk, answer, options), place)
        if isinstance(event, Ending):
            await exchange.event(_with_usage(answer.ending_chunk(index, event), answer, options), place)
            continue
        place = _place_after(place, event)
        piece_chunk = answer.piece_chunk(index, event)
        if piece_chunk is not None:
            await exchange.event(_with_usage(piece_chunk, answer, options), place)
    if options.include_usage:
        await exchange.event(answer.usage_chunk())
    await exchange.write(DONE, last=True)


def _place_after(place: EventId | None, piece: Piece) -> EventId | None:
    if place is None:
        return None
    return replace(place, offset=piece.offset + len(piece.token_ids), digest=piece.digest)


def _with_usage(chunk: Json, answer: Answer, options: StreamOptions) -> Json:
    if options.continuous_usage_stats:
        chunk["usage"] = answer.usage()
    elif options.include_usage:
        chunk["usage"] = None
    return chunk
