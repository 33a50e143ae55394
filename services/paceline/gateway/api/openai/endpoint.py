"""The two completion endpoints: from the fields of a body to the events of an answer.

`paceline.gateway.api.openai.answer` builds the answers, `paceline.gateway.http.response` sends them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from paceline.core.errors import InvalidRequestError
from paceline.gateway.access.fair_shares import current_caller
from paceline.gateway.api.endpoints.endpoint import BodyReader, Call, Work
from paceline.gateway.api.openai.answer import CompletionAnswer, Json
from paceline.gateway.api.openai.bodies import ChatBody, CompletionBody, StreamOptions, parse_body
from paceline.gateway.api.openai.choices import chat_sessions, completion_sessions
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.http.response import DONE, LAST_EVENT_ID, STREAM_HEADERS, Exchange
from paceline.gateway.sessions.output import Ending, Event, Piece
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import Resumption

ItemT = TypeVar("ItemT")

# A slow client stops the sessions after that many events instead of filling memory.
MAX_WAITING_EVENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """One stream has ended."""

    error: Exception | None = None


async def merged(
    streams: Sequence[AsyncGenerator[ItemT, None]],
) -> AsyncGenerator[tuple[int, ItemT], None]:
    """Yields (index of the stream, item) as items come; the first error ends all streams.

    Closing it closes all streams.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, ItemT] | _Ended] = asyncio.Queue(MAX_WAITING_EVENTS)
    tasks: list[asyncio.Task[None]] = []
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(_pump(index, stream, queue)))
            # Each begins in a turn of its own: 128 samples of a long prompt take half a second.
            await asyncio.sleep(0)
        num_open = len(tasks)
        while num_open:
            entry = await queue.get()
            if not isinstance(entry, _Ended):
                yield entry
            elif entry.error is not None:
                raise entry.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[ItemT, None], queue: asyncio.Queue[tuple[int, ItemT] | _Ended]
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as error:  # noqa: BLE001 - raised again by the reader of the queue
        await queue.put(_Ended(error=error))
    else:
        await queue.put(_Ended())


Events = AsyncGenerator[tuple[int, Event], None]

MAX_OFFSET_DIGITS = 10
_SEPARATOR = ":"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """A place in the stream of one session, for `id:` and `Last-Event-ID` of server-sent events.

    A client that has the id of the last event can continue from there at any gateway.

    Attributes:
        offset: Generated tokens up to there.
        digest: Of these; see `paceline.core.messages`.
    """

    session_id: str
    offset: int = 0
    digest: str = ""

    def __str__(self) -> str:
        """Returns it as it is written in a stream."""
        return _SEPARATOR.join((self.session_id, str(self.offset), self.digest))

    @classmethod
    def parse(cls, text: str) -> EventId:
        """Reads what a client sends back.

        Raises:
            InvalidRequestError: It is no id of ours.
        """
        session_id, _, rest = text.partition(_SEPARATOR)
        offset, separator, digest = rest.partition(_SEPARATOR)
        well_formed = offset.isascii() and offset.isdigit() and len(offset) <= MAX_OFFSET_DIGITS
        if not separator or not session_id or not well_formed:
            raise InvalidRequestError(LAST_EVENT_ID, f"must be the id of an event of the stream, got {text[:80]!r}")
        return cls(session_id=session_id, offset=int(offset), digest=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ParsedRequest:
    """A checked request, without its body, which may be long."""

    stream: bool
    options: StreamOptions
    requests: Sequence[SessionRequest]
    answer: CompletionAnswer

    @property
    def place(self) -> EventId | None:
        """Where its stream begins; None where places are not wanted, or the stream could not be resumed."""
        first = self.requests[0]
        wanted = first.resumed or self.options.include_event_ids
        named = wanted and len(self.requests) == 1 and first.resumable
        return EventId(session_id=first.session_id) if named else None


class CompletionEndpoint:
    """POST /v1/completions or /v1/chat/completions.

    Args:
        sessions: Runs the sessions.
        resumption: Takes over sessions whose streams broke off.
        chat: Which of the two.
    """

    def __init__(self, sessions: Sessions, resumption: Resumption, reader: BodyReader, *, chat: bool) -> None:
        self._sessions = sessions
        self._resumption = resumption
        self._reader = reader
        self._chat = chat

    async def __call__(self, call: Call) -> Work:
        """Reads a request; returns what answers it."""
        last_event_id = call.request.headers.get(LAST_EVENT_ID)
        if last_event_id is None:
            parsed = await self._reader.read(call, partial(self._parse, call))
            return self._answer(parsed, call)
        place = EventId.parse(last_event_id)
        return self._resume(place, await self._reader.read(call, self._options), call)

    def _options(self, fields: Json, unknown: UnknownFields) -> StreamOptions:
        """Returns how a stream continues; everything else in the body is known from the session."""
        body = parse_body(ChatBody if self._chat else CompletionBody, fields, unknown)
        if not body.stream or body.n != 1:
            raise InvalidRequestError(LAST_EVENT_ID, "resumes a stream of one choice: stream must be true, n 1")
        return body.stream_options or StreamOptions()

    def _parse(self, call: Call, fields: Json, unknown: UnknownFields) -> _ParsedRequest:
        body: ChatBody | CompletionBody
        request_id = call.exchange.own_id
        if self._chat:
            body = parse_body(ChatBody, fields, unknown)
            requests = chat_sessions(body, self._sessions.model(body.model), request_id, unknown)
        else:
            body = parse_body(CompletionBody, fields, unknown)
            requests = completion_sessions(body, self._sessions.model(body.model), request_id)
        requests = [replace(request, api_key=current_caller().name, span=call.trace.span) for request in requests]
        return self._parsed(call, requests, body.stream_options or StreamOptions(), body.stream, body.n)

    def _parsed(
        self, call: Call, requests: Sequence[SessionRequest], options: StreamOptions, stream: bool, num_samples: int
    ) -> _ParsedRequest:
        request_id = call.exchange.own_id
        call.trace.understood(requests, request_id, num_samples)
        answer = CompletionAnswer(
            chat=self._chat,
            request_id=request_id,
            created_s=int(time.time()),
            model_name=requests[0].model.shown_name,
            requests=requests,
            samples_per_prompt=num_samples,
        )
        return _ParsedRequest(stream=stream, options=options, requests=requests, answer=answer)

    async def _answer(self, parsed: _ParsedRequest, call: Call) -> None:
        with self._sessions.admitted(len(parsed.requests), current_caller()):
            await self._run(parsed, call)

    async def _resume(self, place: EventId, options: StreamOptions, call: Call) -> None:
        """Streams what follows a place in the stream of a session."""
        caller = current_caller()
        with self._sessions.admitted(1, caller, continued=True):
            session = await self._resumption.claim_for(caller, place.session_id, place.offset, place.digest)
            call.exchange.own_id = session.session_id.rpartition("-")[0]
            requests = [replace(session, span=call.trace.span)]
            await self._run(self._parsed(call, requests, options, stream=True, num_samples=1), call)

    async def _run(self, parsed: _ParsedRequest, call: Call) -> None:
        runs = [call.trace.watch(self._sessions.run(request)) for request in parsed.requests]
        async with aclosing(merged(runs)) as events:
            await (_stream if parsed.stream else _collect)(parsed, events, call.exchange)


async def _collect(parsed: _ParsedRequest, events: Events, exchange: Exchange) -> None:
    answer = parsed.answer
    async for index, event in events:
        if isinstance(event, Ending):
            answer.add_ending(index, event)
        else:
            answer.add_piece(index, event)
    await exchange.whole(answer.whole())


async def _stream(parsed: _ParsedRequest, events: Events, exchange: Exchange) -> None:
    answer = parsed.answer
    options = parsed.options
    place = parsed.place
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


def _with_usage(chunk: Json, answer: CompletionAnswer, options: StreamOptions) -> Json:
    if options.continuous_usage_stats:
        chunk["usage"] = answer.usage()
    elif options.include_usage:
        chunk["usage"] = None
    return chunk
