"""The two completion endpoints: from the fields of a body to the events of an answer.

`paceline.gateway.api.openai.answer` builds the answers, `paceline.gateway.http.response` sends them.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.endpoints.endpoint import BodyReader, Call, Work
from paceline.gateway.api.endpoints.request_trace import TOOL_CALLS, RequestTrace
from paceline.gateway.api.openai.answer import CompletionAnswer, Json
from paceline.gateway.api.openai.bodies import ChatBody, CompletionBody, StreamOptions, parse_body
from paceline.gateway.api.openai.choices import chat_sessions, completion_sessions
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.http.response import DONE, LAST_EVENT_ID, Exchange, to_json
from paceline.gateway.sessions.output import Ending, Piece
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import Resumption
from paceline.service.fair_shares import current_caller

MAX_OFFSET_DIGITS = 10
_SEPARATOR = ":"
# Stands for a text that no model writes alone.
TEXT_MARK, USAGE_MARK = "\0", "\0usage"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventId:
    """A place in the stream of one session, for `id:` and `Last-Event-ID` of server-sent events.

    A client that has the id of the last event can continue from there at any gateway.

    Attributes:
        offset: Generated tokens up to there.
        digest: Their digest; see `paceline.core.messages`.
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
            requests = completion_sessions(body, self._sessions.model(body.model), request_id, unknown)
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
        answer, exchange = parsed.answer, call.exchange
        if parsed.stream:
            exchange.num_sessions = len(parsed.requests)
            exchange.ping_while_silent()
            stream = _Stream(parsed, exchange)
            await together(self._runs(parsed, call.trace, stream.piece, stream.ending))
            await stream.end()
        else:
            await together(self._runs(parsed, call.trace, answer.add_piece, answer.add_ending))
            await exchange.whole(answer.whole())

    def _runs(
        self,
        parsed: _ParsedRequest,
        trace: RequestTrace,
        piece: Callable[[int, Piece], object],
        ending: Callable[[int, Ending], object],
    ) -> Iterator[Coroutine[Any, Any, None]]:
        """Yields what runs each session, and hands on what comes of it."""

        async def run(index: int, request: SessionRequest) -> None:
            ended = await self._sessions.run(request, trace.noting(partial(piece, index)))
            trace.ended(ended, index)
            ending(index, ended)
            if parsed.answer.finish_reason(index) == TOOL_CALLS:
                trace.called_tools(index)

        return itertools.starmap(run, enumerate(parsed.requests))


async def together(runs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs the sessions of a request at once; the first error ends them all."""
    tasks: list[asyncio.Task[None]] = []
    try:
        for run in runs:
            tasks.append(asyncio.create_task(run))
            # Each begins in a turn of its own: 128 samples of a long prompt take half a second.
            await asyncio.sleep(0)
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Stream:
    """An answer that is sent as it grows.

    No event is sent before the first piece, so that a refusal of the verifier still has its own status.
    """

    def __init__(self, parsed: _ParsedRequest, exchange: Exchange) -> None:
        self._answer = parsed.answer
        self._options = parsed.options
        self._place = parsed.place
        self._exchange = exchange
        self._opened = False
        # By choice, the chunk of a piece of text around the text, and around what it says of usage.
        self._around: dict[int, Sequence[bytes]] = {}

    def piece(self, index: int, piece: Piece) -> None:
        """Sends what a piece adds to a choice."""
        self._open()
        if self._place is not None:
            offset = piece.offset + len(piece.token_ids)
            self._place = replace(self._place, offset=offset, digest=piece.digest())
        text = self._answer.text_alone(index, piece)
        if text is not None:
            usage = to_json(self._answer.usage()) if self._options.continuous_usage_stats else b""
            before, between, after = self._around.get(index) or self._frame(index)
            self._exchange.json_event(b"".join((before, to_json(text), between, usage, after)), self._place)
            return
        chunk = self._answer.piece_chunk(index, piece)
        if chunk is not None:
            self._send(chunk)

    def _frame(self, index: int) -> Sequence[bytes]:
        chunk = self._with_usage(self._answer.text_chunk(index, TEXT_MARK))
        if self._options.continuous_usage_stats:
            chunk["usage"] = USAGE_MARK
        before, rest = to_json(chunk).split(to_json(TEXT_MARK))
        between, mark, after = rest.partition(to_json(USAGE_MARK))
        around = self._around[index] = (before, between, after) if mark else (before, b"", rest)
        return around

    def ending(self, index: int, ending: Ending) -> None:
        """Sends the end of a choice."""
        self._open()
        self._send(self._answer.ending_chunk(index, ending))

    async def end(self) -> None:
        if self._options.include_usage:
            self._exchange.event(self._answer.usage_chunk())
        await self._exchange.end(DONE)

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            for chunk in self._answer.opening_chunks():
                self._send(chunk)

    def _send(self, chunk: Json) -> None:
        self._exchange.event(self._with_usage(chunk), self._place)

    def _with_usage(self, chunk: Json) -> Json:
        if self._options.continuous_usage_stats:
            chunk["usage"] = self._answer.usage()
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk
