"""POST /v1/responses, and what can be asked of responses that are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from paceline.core.errors import InvalidRequestError, SessionNotFoundError
from paceline.gateway.access.callers import current_caller
from paceline.gateway.api.endpoints.reading import BodyReader
from paceline.gateway.api.openai.translated import Asked, TranslatedEndpoint, stream, told
from paceline.gateway.api.responses.bodies import ResponsesBody
from paceline.gateway.api.responses.keeping import KeptResponse, ResponseShelf
from paceline.gateway.api.responses.requests import chat_of, output_messages
from paceline.gateway.api.responses.telling import ResponseTelling, parts_of
from paceline.gateway.http.errors import HttpError
from paceline.gateway.http.fields import UnknownFields, read_fields
from paceline.gateway.http.response import ErrorForm, Exchange, request_id, until_disconnect
from paceline.gateway.message.growing import Message
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import Resumption
from paceline.obs.tracing import Tracer

Json = dict[str, Any]

IN_PROGRESS, CANCELLED = "in_progress", "cancelled"
MAX_DIGITS = 12
# A second in all.
NUM_CLAIMS, CLAIM_PAUSE_S = 21, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    """What a response says of its request.

    Attributes:
        body: The request.
        messages: The conversation, without instructions.
    """

    body: ResponsesBody
    messages: list[Json]


def error_shape(error: HttpError, request_id: str) -> Json:
    """Returns OpenAI's error object, which is the event of an error as well."""
    del request_id
    return {"type": "error", "code": error.code, "message": error.message, "param": error.param, **error.to_json()}


ERRORS = ErrorForm(shape=error_shape, named=True)


class ResponsesDoor:
    """OpenAI's newer API.

    Args:
        shelf: Keeps responses.
    """

    id_prefix = "resp_"
    errors = ERRORS
    names: Mapping[str, str] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "tool_choice.function": "tool_choice",
        "tool_choice.allowed_tools": "tool_choice",
        "reasoning_effort": "reasoning.effort",
    }

    def __init__(self, shelf: ResponseShelf) -> None:
        self._shelf = shelf

    async def prepare(self, fields: Json) -> list[Json]:
        """Returns the messages of the responses that a request goes on from."""
        previous = fields.get("previous_response_id")
        if previous is None:
            return []
        if not isinstance(previous, str):
            raise InvalidRequestError("previous_response_id", "must be a string")
        kept = await self._shelf.find(previous, current_caller().name, "previous_response_id")
        if kept.response["status"] in (IN_PROGRESS, CANCELLED):
            raise InvalidRequestError("previous_response_id", f"names a response that is {kept.response['status']}")
        return [*kept.messages, *output_messages(kept.response["output"])]

    def understand(self, prepared: list[Json], fields: Json, unknown: UnknownFields) -> Asked:
        """Reads a body."""
        body = read_fields(ResponsesBody, fields, unknown)
        chat = chat_of(body, prepared, unknown)
        messages = chat["messages"][0 if body.instructions is None else 1 :]
        return Asked(chat=chat, stream=body.stream, context=_Context(body=body, messages=messages))

    def telling(self, asked: Asked, request: SessionRequest, message: Message, own_id: str) -> ResponseTelling:
        """Returns what tells an answer."""
        del message
        return ResponseTelling(_response(asked.context.body, request, own_id), request.session_id)

    async def begun(self, asked: Asked, telling: ResponseTelling, request: SessionRequest) -> None:
        """From now on any gateway can go on with it."""
        if asked.context.body.store:
            telling.document = await self._shelf.keep(_kept(asked, telling, request))

    async def ended(self, asked: Asked, telling: ResponseTelling, request: SessionRequest) -> None:
        """From now on others can go on from it."""
        if asked.context.body.store:
            await self._shelf.change(_kept(asked, telling, request), telling.document)


def _kept(asked: Asked, telling: ResponseTelling, request: SessionRequest) -> KeptResponse:
    return KeptResponse(api_key=request.api_key, response=telling.response, messages=asked.context.messages)


def _response(body: ResponsesBody, request: SessionRequest, own_id: str) -> Json:
    """Returns a response before its first token."""
    sampling = request.sampling
    text_format = body.text.format or {"type": "text"}
    return {
        "id": own_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": IN_PROGRESS,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "model": request.model.shown_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": text_format},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": list(body.tools),
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


class _KeptEndpoint:
    """One thing that can be asked of a kept response.

    Args:
        answer: Answers, given the id in the path.
    """

    def __init__(self, answer: Callable[[str, Request, Exchange], Awaitable[None]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; errors become error objects, nothing is raised to the server."""
        request = Request(scope, receive)
        exchange = Exchange(send, given_id=request_id(request.headers), form=ERRORS)
        try:
            await until_disconnect(receive, self._asked(request, exchange))
        except Exception as error:  # noqa: BLE001 - the edge: whatever happens, the client is told
            await exchange.fail(error)

    async def _asked(self, request: Request, exchange: Exchange) -> None:
        try:
            await self._answer(request.path_params["response_id"], request, exchange)
        except Exception as error:  # noqa: BLE001 - told to the client while the session still counts as running
            await exchange.fail(error)


class KeptResponses:
    """What can be asked of kept responses: to be shown, streamed, cancelled, or deleted.

    Args:
        sessions: Runs what is left of one.
        resumption: Takes over its session.
        shelf: Keeps them.
    """

    def __init__(self, sessions: Sessions, resumption: Resumption, shelf: ResponseShelf) -> None:
        self._sessions = sessions
        self._resumption = resumption
        self._shelf = shelf

    async def show(self, response_id: str, request: Request, exchange: Exchange) -> None:
        """Tells a response: as it is, or as a stream, behind the last event that the client has."""
        kept = await self._shelf.find(response_id, current_caller().name)
        if request.query_params.get("stream") != "true":
            await exchange.whole(kept.response)
            return
        after = _number(request.query_params.get("starting_after"))
        if kept.response["status"] == IN_PROGRESS:
            await self._go_on(kept, after, exchange)
        else:
            await stream(_replayed(kept, after), exchange)

    async def _go_on(self, kept: KeptResponse, after: int, exchange: Exchange) -> None:
        """Runs the rest of the session here; whoever ran it is told that it goes on elsewhere."""
        caller = current_caller()
        with self._sessions.errors_counted(), self._sessions.admitted(1, caller):
            session = await self._claim(kept)
            telling = ResponseTelling(kept.response, session.session_id, after)
            ended = partial(self._shelf.change, kept, kept.document)
            message = Message(session.form, session.session_id)
            async with aclosing(told(self._sessions.run(session), telling, message, ended)) as steps:
                await stream(steps, exchange)

    async def cancel(self, response_id: str, request: Request, exchange: Exchange) -> None:
        """Ends a response that is in progress, by taking its session and not going on with it."""
        del request
        kept = await self._shelf.find(response_id, current_caller().name)
        if kept.response["status"] == IN_PROGRESS:
            cancelled = replace(kept, response={**kept.response, "status": CANCELLED})
            await self._claim(kept)
            stands = await self._shelf.change(cancelled, kept.document)
            kept = cancelled if stands else await self._shelf.find(response_id, kept.api_key)
        await exchange.whole(kept.response)

    async def _claim(self, kept: KeptResponse) -> SessionRequest:
        """Takes the session of a response, whose record may be written a moment after its first event is told."""
        for _ in range(NUM_CLAIMS - 1):
            with suppress(SessionNotFoundError):
                return await self._resumption.claim(_session_id(kept), 0, "", kept.api_key)
            await asyncio.sleep(CLAIM_PAUSE_S)
        return await self._resumption.claim(_session_id(kept), 0, "", kept.api_key)

    async def delete(self, response_id: str, request: Request, exchange: Exchange) -> None:
        """Forgets a response."""
        del request
        await self._shelf.forget(response_id, current_caller().name)
        await exchange.whole({"id": response_id, "object": "response", "deleted": True})


def _session_id(kept: KeptResponse) -> str:
    return f"{kept.response['id']}-0"


async def _replayed(kept: KeptResponse, after: int) -> AsyncGenerator[list[Json], None]:
    """Yields the events of a response that has ended."""
    begun = {**kept.response, "status": IN_PROGRESS, "output": [], "usage": None, "incomplete_details": None}
    telling = ResponseTelling(begun, _session_id(kept), after)
    yield telling.opening()
    yield telling.further(parts_of(kept.response["output"]))
    telling.response |= {name: value for name, value in kept.response.items() if name != "output"}
    yield telling.closing()


def _number(given: str | None) -> int:
    """Reads `starting_after`; -1: it is absent."""
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= MAX_DIGITS):
        raise InvalidRequestError("starting_after", "must be the number of an event")
    return int(given)


def response_routes(
    sessions: Sessions, resumption: Resumption, reader: BodyReader, tracer: Tracer, shelf: ResponseShelf
) -> list[BaseRoute]:
    """Returns the routes of the API."""
    kept = KeptResponses(sessions, resumption, shelf)
    one = "/v1/responses/{response_id}"
    return [
        Route("/v1/responses", TranslatedEndpoint(sessions, reader, tracer, ResponsesDoor(shelf)), methods=["POST"]),
        Route(one, _KeptEndpoint(kept.show), methods=["GET"]),
        Route(one, _KeptEndpoint(kept.delete), methods=["DELETE"]),
        Route(f"{one}/cancel", _KeptEndpoint(kept.cancel), methods=["POST"]),
    ]
