"""Generation in the words of other APIs: a request becomes a chat of OpenAI's, and the chat's events become theirs.

It knows no API; each is a `ChatApi`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from paceline.core.errors import InvalidRequestError
from paceline.gateway.access.fair_shares import current_caller
from paceline.gateway.api.endpoints.endpoint import BodyReader, Call, Work
from paceline.gateway.api.openai.bodies import ChatBody, parse_body
from paceline.gateway.api.openai.choices import chat_sessions
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.http.response import STREAM_HEADERS, Exchange
from paceline.gateway.message.growing import Message
from paceline.gateway.message.reader import Part
from paceline.gateway.sessions.output import Ending, Event
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions

Json = dict[str, Any]
_MESSAGE = re.compile(r"messages\[(\d+)\]")


class ApiAnswer(Protocol):
    """One answer in the words of an API; events have a `type`."""

    def opening(self) -> list[Json]:
        """Returns what a stream begins with."""

    def further(self, parts: Sequence[Part]) -> list[Json]:
        """Returns the events of further parts of the message."""

    def ending(self, ending: Ending) -> list[Json]:
        """Returns the last events."""

    def whole(self) -> Json:
        """Returns all of it; it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Translated:
    """A request of an API in the words of OpenAI's chats.

    Attributes:
        chat: A body of /v1/chat/completions.
        stream: Whether the answer is a stream.
        places: Where in the request each message of the chat begins.
        context: What else of the request the API needs for its answer.
    """

    chat: Json
    stream: bool
    places: Sequence[str]
    context: Any = None


class Keeper:
    """What is done about an answer besides sending it; by default nothing."""

    def begun(self) -> None:
        """The verifier runs it: its first event has come."""

    async def ended(self) -> None:
        """It is complete. Returns before its last events are sent."""

    def broke_off(self, error: Exception | None) -> None:
        """It has begun and will not be completed here.

        Args:
            error: Why; None: its client has left.
        """


class ChatApi(ABC):
    """An API whose requests and answers are chats in other words.

    Attributes:
        names: Its own names of fields of chats, for errors; longer ones come first.
    """

    names: ClassVar[Mapping[str, str]]

    async def prepare(self, fields: Json) -> Any:
        """Returns what has to be fetched before a body can be translated."""
        del fields

    @abstractmethod
    def translate(self, prepared: Any, fields: Json, unknown: UnknownFields) -> Translated:
        """Reads a body."""

    @abstractmethod
    def answer(self, translated: Translated, request: SessionRequest, message: Message, own_id: str) -> ApiAnswer:
        """Returns the empty answer of a session."""

    def keeper(self, translated: Translated, answer: Any, request: SessionRequest) -> Keeper:
        del translated, answer, request
        return Keeper()


class TranslatedEndpoint:
    """POST of another API."""

    def __init__(self, sessions: Sessions, reader: BodyReader, api: ChatApi) -> None:
        self._sessions = sessions
        self._reader = reader
        self._api = api

    async def __call__(self, call: Call) -> Work:
        """Reads a request; returns what answers it."""
        order = await self._reader.read(call, partial(self._order, call), self._api.prepare)
        return self._answer(*order, call)

    def _order(
        self, call: Call, prepared: Any, fields: Json, unknown: UnknownFields
    ) -> tuple[Translated, SessionRequest]:
        translated = self._api.translate(prepared, fields, unknown)
        own_id = call.exchange.own_id
        try:
            body = parse_body(ChatBody, translated.chat, unknown)
            [request] = chat_sessions(body, self._sessions.model(body.model), own_id, unknown)
        except InvalidRequestError as error:
            raise renamed(error, self._api.names, translated.places) from None
        call.trace.understood([request], own_id)
        refusal = renamed(InvalidRequestError(request.grammar_field, ""), self._api.names, translated.places)
        caller = current_caller().name
        return translated, replace(request, api_key=caller, span=call.trace.span, grammar_field=refusal.field)

    async def _answer(self, translated: Translated, request: SessionRequest, call: Call) -> None:
        with self._sessions.admitted(1, current_caller()):
            message = Message(request.form, request.session_id)
            answer = self._api.answer(translated, request, message, call.exchange.own_id)
            keeper = self._api.keeper(translated, answer, request)
            events = call.trace.watch(self._sessions.run(request))
            async with aclosing(answer_steps(events, answer, message, keeper)) as steps:
                if translated.stream:
                    await stream(steps, call.exchange)
                    return
                async for _ in steps:
                    continue
                await call.exchange.whole(answer.whole())


def renamed(error: InvalidRequestError, names: Mapping[str, str], places: Sequence[str]) -> InvalidRequestError:
    """Returns an error of a chat with the field's name in the API.

    Args:
        error: Names a field of a chat.
        names: The API's own names of such fields.
        places: Where in the request each message of the chat begins.
    """
    message = _MESSAGE.match(error.field)
    if message is not None:
        # What is within a message is elsewhere within items and blocks.
        return InvalidRequestError(places[int(message[1])], error.problem)
    for name, own in names.items():
        suffix = error.field.removeprefix(name)
        if error.field.startswith(name) and suffix[:1] in ("", ".", "["):
            return InvalidRequestError(own if suffix.startswith("[") else own + suffix, error.problem)
    return error


async def answer_steps(
    events: AsyncGenerator[Event, None], answer: ApiAnswer, message: Message, keeper: Keeper
) -> AsyncGenerator[list[Json], None]:
    """Yields the events of an answer, step by step; what becomes of it, the keeper knows in every case."""
    opened = ended = False
    error: Exception | None = None
    try:
        async with aclosing(events) as running:
            async for event in running:
                out = [] if opened else answer.opening()
                if not opened:
                    opened = True
                    keeper.begun()
                if isinstance(event, Ending):
                    out += answer.further(message.take(event.parts))
                    out += answer.ending(event)
                    ended = True
                    await keeper.ended()
                else:
                    out += answer.further(message.take(event.known_parts + event.parts))
                yield out
    except Exception as raised:
        error = raised
        raise
    finally:
        if opened and not ended:
            keeper.broke_off(error)


async def stream(steps: AsyncGenerator[list[Json], None], exchange: Exchange) -> None:
    """Sends nothing before the first step, so that a refusal of the verifier still has its own status."""
    begun = False
    async for step in steps:
        if not begun:
            begun = True
            await exchange.begin(200, STREAM_HEADERS)
        for event in step:
            await exchange.event(event)
    await exchange.write(b"", last=True)
