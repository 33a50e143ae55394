"""Generation in the words of other APIs: a request becomes a chat of OpenAI's, and the chat's events become theirs.

It knows no API; each is a `TranslatedEndpoint`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from paceline.core.errors import InvalidRequestError
from paceline.core.messages import FinishReason
from paceline.gateway.api.endpoints.endpoint import BodyReader, Call, Work
from paceline.gateway.api.openai.bodies import ChatBody, parse_body
from paceline.gateway.api.openai.choices import chat_sessions
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.message.growing import Message
from paceline.gateway.message.reader import Part
from paceline.gateway.sessions.output import Ending, Piece
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions
from paceline.service.fair_shares import current_caller

Json = dict[str, Any]
_MESSAGE = re.compile(r"messages\[(\d+)\]")


class ApiAnswer(Protocol):
    """An answer in an API's format; events have a `type`."""

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
        context: Other request fields that the API needs for its answer.
    """

    chat: Json
    stream: bool
    places: Sequence[str]
    context: Any = None


class Keeper:
    """Keeps an answer besides sending it; by default nothing."""

    def begun(self) -> None:
        """The verifier runs it: its first event has come."""

    async def ended(self) -> None:
        """It is complete. Returns before its last events are sent."""

    def broke_off(self, error: Exception | None) -> None:
        """It has begun and will not be completed here.

        Args:
            error: Why; None: its client has left.
        """


class TranslatedEndpoint(ABC):
    """POST of an API whose requests and answers are chats in other words.

    Attributes:
        names: Its own names of fields of chats, for errors; longer ones come first.
    """

    names: ClassVar[Mapping[str, str]]

    def __init__(self, sessions: Sessions, reader: BodyReader) -> None:
        self._sessions = sessions
        self._reader = reader

    async def prepare(self, fields: Json) -> Sequence[Any] | None:
        """Returns what has to be fetched before a body can be translated."""
        del fields
        return None

    @abstractmethod
    def translate(self, prepared: Any, fields: Json, unknown: UnknownFields) -> Translated:
        """Reads a body."""

    @abstractmethod
    def answer(self, translated: Translated, request: SessionRequest, message: Message, own_id: str) -> ApiAnswer:
        """Returns the empty answer of a session."""

    def keeper(self, translated: Translated, answer: Any, request: SessionRequest) -> Keeper:
        del translated, answer, request
        return Keeper()

    async def __call__(self, call: Call) -> Work:
        """Reads a request; returns what answers it."""
        order = await self._reader.read(call, partial(self._order, call), self.prepare)
        return self._answer(*order, call)

    def _order(
        self, call: Call, prepared: Any, fields: Json, unknown: UnknownFields
    ) -> tuple[Translated, SessionRequest]:
        translated = self.translate(prepared, fields, unknown)
        own_id = call.exchange.own_id
        try:
            body = parse_body(ChatBody, translated.chat, unknown)
            [request] = chat_sessions(body, self._sessions.model(body.model), own_id, unknown)
        except InvalidRequestError as error:
            raise renamed(error, self.names, translated.places) from None
        call.trace.understood([request], own_id)
        refusal = renamed(InvalidRequestError(request.grammar_field, ""), self.names, translated.places)
        caller = current_caller().name
        return translated, replace(request, api_key=caller, span=call.trace.span, grammar_field=refusal.field)

    async def _answer(self, translated: Translated, request: SessionRequest, call: Call) -> None:
        with self._sessions.admitted(1, current_caller()):
            if translated.stream:
                call.exchange.ping_while_silent()
            message = Message(request.form, request.session_id)
            answer = self.answer(translated, request, message, call.exchange.own_id)
            keeper = self.keeper(translated, answer, request)
            told = ToldAnswer(answer, message, keeper, call.exchange.event if translated.stream else unsent)
            ending = await told.told(self._sessions.run(request, call.trace.noting(told.piece)))
            call.trace.ended(ending)
            if message.calls and ending.finish_reason is FinishReason.STOP:
                call.trace.called_tools()
            await (call.exchange.end() if translated.stream else call.exchange.whole(answer.whole()))


def renamed(error: InvalidRequestError, names: Mapping[str, str], places: Sequence[str]) -> InvalidRequestError:
    """Returns an error of a chat with the field's name in the API.

    Args:
        error: Names a field of a chat.
        names: The API's own names of such fields.
        places: Where in the request each message of the chat begins.
    """
    message = _MESSAGE.match(error.field)
    if message is not None:
        # Positions inside messages differ from those inside items and blocks.
        return InvalidRequestError(places[int(message[1])], error.problem)
    for name, own in names.items():
        suffix = error.field.removeprefix(name)
        if error.field.startswith(name) and suffix[:1] in ("", ".", "["):
            return InvalidRequestError(own if suffix.startswith("[") else own + suffix, error.problem)
    return error


class ToldAnswer:
    """An answer that is sent as it grows; the keeper learns its end in every case.

    No event is sent before the first piece, so that a refusal of the verifier still has its own status.

    Args:
        answer: Still empty.
        message: The message so far.
        send: Takes an event.
    """

    def __init__(self, answer: ApiAnswer, message: Message, keeper: Keeper, send: Callable[[Json], None]) -> None:
        self._answer = answer
        self._message = message
        self._keeper = keeper
        self._send = send
        self._opened = False

    def piece(self, piece: Piece) -> None:
        self._open()
        self._send_all(self._answer.further(self._message.take(piece.known_parts + piece.parts)))

    async def told(self, run: Coroutine[Any, Any, Ending]) -> Ending:
        """Returns how the session ended that makes the answer."""
        ended, error = False, None
        try:
            ending = await run
            self._open()
            last = [*self._answer.further(self._message.take(ending.parts)), *self._answer.ending(ending)]
            ended = True
            await self._keeper.ended()
            self._send_all(last)
        except Exception as raised:
            error = raised
            raise
        finally:
            if self._opened and not ended:
                self._keeper.broke_off(error)
        return ending

    def _open(self) -> None:
        if not self._opened:
            self._opened = True
            opening = self._answer.opening()
            self._keeper.begun()
            self._send_all(opening)

    def _send_all(self, events: Sequence[Json]) -> None:
        for event in events:
            self._send(event)


def unsent(_: Json) -> None:
    """Drops the events of an answer that is sent as a whole."""
