"""The two completion endpoints as ASGI applications: from bytes of a body to bytes of an answer.

What they say stands in `paceline.gateway.answers`, how it is sent in `paceline.gateway.exchange`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from paceline.gateway.answers import Answer, Json
from paceline.gateway.api import ChatBody, CommonBody, CompletionBody, StreamOptions, parse_body
from paceline.gateway.body import parse_json_object, read_body
from paceline.gateway.callers import current_caller
from paceline.gateway.choices import chat_sessions, completion_sessions
from paceline.gateway.exchange import DONE, JSON_HEADERS, STREAM_HEADERS, Exchange, to_json
from paceline.gateway.merge import merged, until_disconnect
from paceline.gateway.pieces import Ending, Event
from paceline.gateway.request_trace import RequestTrace
from paceline.gateway.requests import SessionRequest
from paceline.gateway.sessions import Sessions
from paceline.gateway.shares import Shares
from paceline.gateway.workers import Workers
from paceline.obs.attributes import CHAT, TEXT_COMPLETION
from paceline.obs.tracing import TRACEPARENT, Tracing

# Larger bodies are read in a thread, so that no stream waits for a tokenizer.
MAX_INLINE_BYTES = 4 * 1024

Events = AsyncGenerator[tuple[int, Event], None]


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


class CompletionEndpoint:
    """POST /v1/completions or /v1/chat/completions."""

    def __init__(
        self, sessions: Sessions, limits: BodyLimits, workers: Workers, tracing: Tracing, *, chat: bool
    ) -> None:
        self._sessions = sessions
        self._workers = workers
        self._limits = limits
        self._tracing = tracing
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; errors become error objects, nothing is raised to the server."""
        request = Request(scope, receive)
        operation = CHAT if self._chat else TEXT_COMPLETION
        with RequestTrace(self._tracing, operation, request.headers.get(TRACEPARENT, "")) as trace:
            exchange = Exchange(send, trace.fail)
            try:
                with self._sessions.errors_counted():
                    order = await self._read_order(request, trace)
                await until_disconnect(receive, self._answer(order, exchange, trace))
            except Exception as error:  # noqa: BLE001 - the edge: whatever happens, the client is told
                await exchange.fail(error)

    async def _read_order(self, request: Request, trace: RequestTrace) -> _Order:
        with self._limits.reading.take(0, current_caller()) as held:
            raw = await read_body(
                request.stream(),
                request.headers.get("content-length"),
                held,
                max_bytes=self._limits.max_bytes,
                timeout_s=self._limits.timeout_s,
            )
            if len(raw) <= MAX_INLINE_BYTES:
                return self._order(raw, trace)
            return await self._workers.run(partial(self._order, raw, trace))

    def _order(self, raw: bytearray, trace: RequestTrace) -> _Order:
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
        answer = Answer(
            chat=self._chat,
            request_id=request_id,
            created_s=int(time.time()),
            model_name=model.identity.name,
            requests=requests,
            samples_per_prompt=body.n,
        )
        options = body.stream_options or StreamOptions()
        return _Order(stream=body.stream, options=options, requests=requests, answer=answer)

    async def _answer(self, order: _Order, exchange: Exchange, trace: RequestTrace) -> None:
        try:
            with self._sessions.errors_counted(), self._sessions.admitted(len(order.requests), current_caller()):
                runs = [trace.watch(self._sessions.run(request)) for request in order.requests]
                async with aclosing(merged(runs)) as events:
                    if order.stream:
                        await _stream(order, events, exchange)
                    else:
                        await _collect(order, events, exchange)
        except Exception as error:  # noqa: BLE001 - told to the client while the session still counts as running
            await exchange.fail(error)


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
    begun = False
    async for index, event in events:
        # Nothing is sent before the first event, so that a refusal of the verifier still has its own status.
        if not begun:
            begun = True
            await exchange.begin(200, STREAM_HEADERS)
            for chunk in answer.opening_chunks():
                await exchange.event(_with_usage(chunk, answer, options))
        if isinstance(event, Ending):
            await exchange.event(_with_usage(answer.ending_chunk(index, event), answer, options))
            continue
        piece_chunk = answer.piece_chunk(index, event)
        if piece_chunk is not None:
            await exchange.event(_with_usage(piece_chunk, answer, options))
    if options.include_usage:
        await exchange.event(answer.usage_chunk())
    await exchange.write(DONE, last=True)


def _with_usage(chunk: Json, answer: Answer, options: StreamOptions) -> Json:
    if options.continuous_usage_stats:
        chunk["usage"] = answer.usage()
    elif options.include_usage:
        chunk["usage"] = None
    return chunk
