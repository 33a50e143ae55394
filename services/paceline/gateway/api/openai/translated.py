"""Endpoints of other APIs over the sessions of chats: they translate the request, and the answer's events back.

It knows no API; each is a `Door`.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from paceline.core.errors import InvalidRequestError
from paceline.gateway.access.callers import current_caller
from paceline.gateway.api.endpoints.reading import BodyReader
from paceline.gateway.api.endpoints.request_trace import RequestTrace, traced_request
from paceline.gateway.api.openai.bodies import ChatBody, parse_body
from paceline.gateway.api.openai.choices import chat_sessions
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.http.response import STREAM_HEADERS, ErrorForm, Exchange, request_id, until_disconnect
from paceline.gateway.message.growing import Message
from paceline.gateway.message.parts import Part
from paceline.gateway.sessions.output import Ending, Event
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions
from paceline.obs.attributes import CHAT
from paceline.obs.tracing import TRACEPARENT, Tracer

Json = dict[str, Any]


TellingT = TypeVar("TellingT", bound="Telling")


class Telling(Protocol):
    """One answer as an API tells it; events have a `type`."""

    def opening(self) -> list[Json]:
        """Returns what a stream begins with."""

    def further(self, parts: Sequence[Part]) -> list[Json]:
        """Returns the events of further parts of the message."""

    def ending(self, ending: Ending) -> list[Json]:
        """Returns the last events."""

    def whole(self) -> Json:
        """Returns all of it; it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request of an API as it is understood.

    Attributes:
        chat: The same as a body of /v1/chat/completions.
        stream: Whether the answer is a stream.
        context: What the door wants to know again when it tells the answer.
    """

    chat: Json
    stream: bool
    context: Any = None


class Door(Protocol[TellingT]):
    """An API.

    Attributes:
        id_prefix: What ids of its answers begin with.
        errors: How it tells errors.
        names: Its own names of fields of chats, for errors; the longest stand first.
    """

    id_prefix: str
    errors: ErrorForm
    names: Mapping[str, str]

    async def prepare(self, fields: Json) -> Any:
        """Returns what has to be fetched before a body is understood."""

    def understand(self, prepared: Any, fields: Json, unknown: UnknownFields) -> Asked:
        """Reads a body."""

    def telling(self, asked: Asked, request: SessionRequest, message: Message, own_id: str) -> TellingT:
        """Returns what tells the answer of a session."""

    async def begun(self, asked: Asked, telling: TellingT, request: SessionRequest) -> None:
        """The session is about to run."""

    async def ended(self, asked: Asked, telling: TellingT, request: SessionRequest) -> None:
        """It has ended well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    asked: Asked
    request: SessionRequest


class TranslatedEndpoint:
    """POST of another API."""

    def __init__(self, sessions: Sessions, reader: BodyReader, tracer: Tracer, door: Door[Any]) -> None:
        self._sessions = sessions
        self._reader = reader
        self._tracer = tracer
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; errors become error objects, nothing is raised to the server."""
        request = Request(scope, receive)
        given, own = request_id(request.headers), f"{self._door.id_prefix}{uuid.uuid4().hex}"
        with traced_request(self._tracer, CHAT, request.headers.get(TRACEPARENT, ""), given) as trace:
            exchange = Exchange(send, trace.fail, given_id=given, own_id=own, form=self._door.errors)
            try:
                with self._sessions.errors_counted():
                    work = await self._work(request, exchange, trace)
                await until_disconnect(receive, work)
            except Exception as error:  # noqa: BLE001 - the edge: whatever happens, the client is told
                await exchange.fail(error)

    async def _work(self, request: Request, exchange: Exchange, trace: RequestTrace) -> Coroutine[Any, Any, None]:
        understand = partial(self._order, exchange.own_id, trace)
        order = await self._reader.read(request, exchange, understand, self._door.prepare)
        return self._answer(order, exchange, trace)

    def _order(self, own_id: str, trace: RequestTrace, prepared: Any, fields: Json, unknown: UnknownFields) -> _Order:
        asked = self._door.understand(prepared, fields, unknown)
        try:
            body = parse_body(ChatBody, asked.chat, unknown)
            model = self._sessions.model(body.model)
            [request] = chat_sessions(body, model, own_id, unknown)
        except InvalidRequestError as error:
            raise _renamed(error, self._door.names) from None
        trace.asked([request], own_id, 1)
        return _Order(asked=asked, request=replace(request, api_key=current_caller().name, span=trace.span))

    async def _answer(self, order: _Order, exchange: Exchange, trace: RequestTrace) -> None:
        try:
            with self._sessions.errors_counted(), self._sessions.admitted(1, current_caller()):
                message = Message(order.request.form, order.request.session_id)
                telling = self._door.telling(order.asked, order.request, message, exchange.own_id)
                await self._door.begun(order.asked, telling, order.request)
                runs = trace.watch(self._sessions.run(order.request))
                ended = partial(self._door.ended, order.asked, telling, order.request)
                async with aclosing(told(runs, telling, message, ended)) as steps:
                    await (stream(steps, exchange) if order.asked.stream else _collect(steps, telling, exchange))
        except Exception as error:  # noqa: BLE001 - told to the client while the session still counts as running
            await exchange.fail(error)


def _renamed(error: InvalidRequestError, names: Mapping[str, str]) -> InvalidRequestError:
    """Returns an error of a chat with the field's name in the API; places within messages are others there."""
    for name, own in names.items():
        rest = error.field.removeprefix(name)
        if error.field.startswith(name) and rest[:1] in ("", ".", "["):
            return InvalidRequestError(own if rest.startswith("[") else own + rest, error.problem)
    return error


async def told(
    events: AsyncGenerator[Event, None], telling: Telling, message: Message, ended: Callable[[], Awaitable[object]]
) -> AsyncGenerator[list[Json], None]:
    """Yields the events of an answer, step by step; `ended` is waited for before the last."""
    opened = False
    async with aclosing(events) as running:
        async for event in running:
            out = [] if opened else telling.opening()
            opened = True
            if isinstance(event, Ending):
                out += telling.further(message.finish())
                out += telling.ending(event)
                await ended()
            else:
                out += telling.further(message.read(event.known_text + event.text))
            yield out


async def _collect(steps: AsyncGenerator[list[Json], None], telling: Telling, exchange: Exchange) -> None:
    async for _ in steps:
        continue
    await exchange.whole(telling.whole())


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
