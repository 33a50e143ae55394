"""The two completion endpoints as ASGI applications: from bytes of a body to bytes of an answer.

What they say stands in `paceline.gateway.api.openai.answers`, how it is sent in `paceline.gateway.http.response`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from paceline.core.errors import InvalidRequestError
from paceline.gateway.access.callers import current_caller
from paceline.gateway.api.endpoints.reading import BodyReader
from paceline.gateway.api.endpoints.request_trace import RequestTrace, traced_request
from paceline.gateway.api.openai.answers import Answer, Json
from paceline.gateway.api.openai.bodies import ChatBody, CommonBody, CompletionBody, StreamOptions, parse_body
from paceline.gateway.api.openai.choices import chat_sessions, completion_sessions
from paceline.gateway.api.openai.event_ids import EventId
from paceline.gateway.api.openai.merge_streams import merged
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.http.response import DONE, LAST_EVENT_ID, STREAM_HEADERS, Exchange, request_id, until_disconnect
from paceline.gateway.sessions.output import Ending, Event, Piece
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import Resumption
from paceline.obs.attributes import CHAT, TEXT_COMPLETION
from paceline.obs.tracing import TRACEPARENT, Tracer

Events = AsyncGenerator[tuple[int, Event], None]


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
        reader: BodyReader,
        tracer: Tracer,
        *,
        chat: bool,
    ) -> None:
        self._sessions = sessions
        self._resumption = resumption
        self._reader = reader
        self._tracer = tracer
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; errors become error objects, nothing is raised to the server."""
        request = Request(scope, receive)
        operation = CHAT if self._chat else TEXT_COMPLETION
        given, own = request_id(request.headers), f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        with traced_request(self._tracer, operation, request.headers.get(TRACEPARENT, ""), given) as trace:
            exchange = Exchange(send, trace.fail, given_id=given, own_id=own)
            try:
                with self._sessions.errors_counted():
                    work = await self._work(request, exchange, trace)
                await until_disconnect(receive, work)
            except Exception as error:  # noqa: BLE001 - the edge: whatever happens, the client is told
                await exchange.fail(error)

    async def _work(self, request: Request, exchange: Exchange, trace: RequestTrace) -> Coroutine[Any, Any, None]:
        """Reads a request; returns what answers it."""
        last_event_id = request.headers.get(LAST_EVENT_ID)
        if last_event_id is None:
            order = await self._reader.read(request, exchange, partial(self._order, exchange.own_id, trace))
            return self._answer(order, exchange, trace)
        place = EventId.parse(last_event_id)
        return self._go_on(place, await self._reader.read(request, exchange, self._options), exchange, trace)

    def _options(self, fields: Json, unknown: UnknownFields) -> StreamOptions:
        """Returns how a stream is to go on; all else that a body says is known of the session."""
        body = parse_body(ChatBody if self._chat else CompletionBody, fields, unknown)
        if not body.stream or body.n != 1:
            raise InvalidRequestError(LAST_EVENT_ID, "goes on with a stream of one choice: stream must be true, n 1")
        return body.stream_options or StreamOptions()

    def _order(self, own_id: str, trace: RequestTrace, fields: Json, unknown: UnknownFields) -> _Order:
        body: CommonBody
        if self._chat:
            body = chat = parse_body(ChatBody, fields, unknown)
            model = self._sessions.model(body.model)
            requests = chat_sessions(chat, model, own_id, unknown)
        else:
            body = completion = parse_body(CompletionBody, fields, unknown)
            model = self._sessions.model(body.model)
            requests = completion_sessions(completion, model, own_id)
        requests = [replace(request, api_key=current_caller().name, span=trace.span) for request in requests]
        trace.asked(requests, own_id, body.n)
        options = body.stream_options or StreamOptions()
        answer = self._empty_answer(requests, own_id, body.n)
        return _Order(stream=body.stream, options=options, requests=requests, answer=answer)

    def _empty_answer(self, requests: Sequence[SessionRequest], own_id: str, samples_per_prompt: int) -> Answer:
        return Answer(
            chat=self._chat,
            request_id=own_id,
            created_s=int(time.time()),
            model_name=requests[0].model.shown_name,
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
                exchange.own_id = session.session_id.rpartition("-")[0]
                trace.asked(requests, exchange.own_id, 1)
                answer = self._empty_answer(requests, exchange.own_id, 1)
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
    await exchange.whole(answer.whole())


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
