"""POST /v1/responses, and the operations on responses that are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from typing_extensions import override

from paceline.core.errors import InvalidRequestError, SessionNotFoundError, StaleEpochError
from paceline.gateway.api.endpoints.endpoint import BodyReader, Call, Work
from paceline.gateway.api.openai.translated import Keeper, ToldAnswer, Translated, TranslatedEndpoint
from paceline.gateway.api.responses.answer import ResponseAnswer, parts_of, response_of
from paceline.gateway.api.responses.bodies import MAX_REFERRED, ResponsesBody
from paceline.gateway.api.responses.kept import (
    CANCELLED,
    ECHOED,
    FAILED,
    IN_PROGRESS,
    KeptResponse,
    ResponseShelf,
    as_written,
    interrupted,
    running_rank,
)
from paceline.gateway.api.responses.requests import chat_of, output_messages, referred, with_items
from paceline.gateway.http.errors import HttpError, to_http
from paceline.gateway.http.fields import UnknownFields, read_fields
from paceline.gateway.http.response import ErrorForm, Exchange
from paceline.gateway.message.growing import Message
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions
from paceline.gateway.sessions.take_over import Resumption
from paceline.service.fair_shares import current_caller
from paceline.store.base import FINAL

Json = dict[str, Any]

MAX_DIGITS = 12


# A request's body, its conversation without instructions, and the parts of it that are kept; None: the response is not.
_Context = tuple[ResponsesBody, list[Json], bytes | None]
# The conversation that a request continues, without instructions, and the items of kept responses that it refers to, by
# their ids.
_Earlier = tuple[list[Json], Mapping[str, Json]]


def error_shape(error: HttpError, request_id: str) -> Json:
    """Returns OpenAI's error object, which is the event of an error as well."""
    del request_id
    return {"type": "error", "code": error.code, "message": error.message, "param": error.param, **error.to_json()}


ERRORS = ErrorForm(shape=error_shape, named=True)


class ResponsesEndpoint(TranslatedEndpoint):
    """OpenAI's newer API; kept responses are shown, streamed, cancelled, or deleted.

    Args:
        resumption: Takes over the session of a response.
    """

    names: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "tool_choice.function": "tool_choice",
        "tool_choice.allowed_tools": "tool_choice",
        "reasoning_effort": "reasoning.effort",
    }

    def __init__(self, sessions: Sessions, reader: BodyReader, resumption: Resumption, shelf: ResponseShelf) -> None:
        super().__init__(sessions, reader)
        self._resumption = resumption
        self._shelf = shelf

    @override
    async def prepare(self, fields: Json) -> _Earlier:
        messages = await self._previous(fields.get("previous_response_id"))
        return messages, await self._items(referred(fields.get("input")))

    async def _previous(self, previous: Any) -> list[Json]:
        """Returns the conversation up to the end of a response."""
        if previous is None:
            return []
        if not isinstance(previous, str):
            raise InvalidRequestError("previous_response_id", "must be a string")
        kept = await self._shelf.find(previous, current_caller().name, "previous_response_id")
        status = kept.response["status"]
        if not kept.final or status == CANCELLED:
            raise InvalidRequestError("previous_response_id", f"names a response that is {status}, not completed")
        return [*kept.messages, *output_messages(kept.response["output"])]

    async def _items(self, item_ids: Sequence[str]) -> dict[str, Json]:
        """Returns the items of kept responses with these ids, as far as they are known."""
        names = dict.fromkeys(filter(None, map(response_of, item_ids)))
        if len(names) > MAX_REFERRED:
            raise InvalidRequestError(
                "input", f"refers to items of {len(names)} responses, at most {MAX_REFERRED} are looked up"
            )
        items: dict[str, Json] = {}
        for name in names:
            with suppress(SessionNotFoundError):
                kept = await self._shelf.find(name, current_caller().name)
                items |= {item["id"]: item for item in kept.response["output"] if kept.final}
        return items

    @override
    def translate(self, prepared: _Earlier, fields: Json, unknown: UnknownFields) -> Translated:
        earlier, items = prepared
        body = read_fields(ResponsesBody, with_items(fields, items), unknown)
        chat, places = chat_of(body, earlier, unknown)
        messages = chat["messages"][0 if body.instructions is None else 1 :]
        kept = as_written(messages, _echoed(body), self._shelf.room_bytes) if body.store else None
        context: _Context = body, messages, kept
        return Translated(chat=chat, places=places, stream=body.stream, context=context)

    @override
    def answer(self, translated: Translated, request: SessionRequest, message: Message, own_id: str) -> ResponseAnswer:
        body, _, _ = translated.context
        return ResponseAnswer(_response(body, request, own_id), message.call_id)

    @override
    def keeper(self, translated: Translated, answer: ResponseAnswer, request: SessionRequest) -> Keeper:
        _, messages, kept = translated.context
        if kept is None:
            return Keeper()
        begun = KeptResponse(
            api_key=request.api_key,
            response=answer.response,
            messages=messages,
            request=kept,
            rank=running_rank(request.epoch),
        )
        return _ResponseKeeper(self._shelf, answer, begun)

    async def show(self, call: Call) -> Work:
        """Answers with a response: as it is, or as a stream from the last event on that the client has."""
        query, kept = call.request.query_params, await self._found(call)
        # HEAD comes here, too, and must not take the session from the call that runs it.
        if query.get("stream") != "true" or call.request.method == "HEAD":
            return call.exchange.whole(kept.response)
        after = _number(query.get("starting_after"))
        return self._replay(kept, after, call.exchange) if kept.final else self._resume(kept, after, call.exchange)

    async def _replay(self, kept: KeptResponse, after: int, exchange: Exchange) -> None:
        for event in _replayed(kept, after):
            exchange.event(event)
            # Nothing here waits, and there may be thousands.
            await asyncio.sleep(0)
            await exchange.flushed()
        await exchange.end()

    async def _resume(self, kept: KeptResponse, after: int, exchange: Exchange) -> None:
        """Runs the rest of the session here; the call that ran it ends with an error."""
        caller = current_caller()
        with self._sessions.admitted(1, caller, continued=True):
            try:
                session = await self._resumption.claim_for(caller, kept.session_id, 0, "")
            except SessionNotFoundError:
                if kept.in_progress:
                    raise
                await self._replay(kept, after, exchange)
                return
            exchange.ping_while_silent()
            message = Message(session.form, session.session_id)
            answer = ResponseAnswer(_begun(kept), message.call_id, after)
            begun = replace(kept, response=answer.response, rank=running_rank(session.epoch))
            keeper = _ResponseKeeper(self._shelf, answer, begun, replaces=True)
            told = ToldAnswer(answer, message, keeper, exchange.event)
            await told.told(self._sessions.run(session, told.piece))
            await exchange.end()

    async def cancel(self, call: Call) -> Work:
        """Ends a response that is in progress, by taking its session and not running it."""
        kept = await self._found(call)
        if kept.in_progress:
            cancelled = replace(kept, response={**kept.response, "status": CANCELLED}, rank=FINAL)
            await self._resumption.claim(kept.session_id, 0, "", kept.api_key)
            kept = cancelled if await self._shelf.end(cancelled) else await self._found(call)
        return call.exchange.whole(kept.response)

    async def delete(self, call: Call) -> Work:
        """Deletes a response; one in progress is still sent to the client that reads it."""
        response_id = call.request.path_params["response_id"]
        await self._shelf.forget(response_id, current_caller().name)
        return call.exchange.whole({"id": response_id, "object": "response", "deleted": True})

    async def _found(self, call: Call) -> KeptResponse:
        return await self._shelf.find(call.request.path_params["response_id"], current_caller().name)


class _ResponseKeeper(Keeper):
    """Keeps what becomes of one response.

    Args:
        begun: As its session begins here.
        replaces: Whether it is kept already.
    """

    def __init__(
        self, shelf: ResponseShelf, answer: ResponseAnswer, begun: KeptResponse, *, replaces: bool = False
    ) -> None:
        self._shelf = shelf
        self._answer = answer
        self._begun = begun
        self._replaces = replaces

    @override
    def begun(self) -> None:
        # From now on any gateway can resume it.
        response = {**self._answer.response, "output": []}
        self._put(replace(self._begun, response=response))

    @override
    async def ended(self) -> None:
        # From now on it can be a `previous_response_id`.
        ended = replace(self._begun, response=self._answer.response, rank=FINAL)
        self._put(ended)
        await self._shelf.written(ended)

    @override
    def broke_off(self, error: Exception | None) -> None:
        if isinstance(error, StaleEpochError):
            # It goes on elsewhere, or has been cancelled there.
            self._shelf.leave(self._begun)
            return
        self._answer.break_off(interrupted() if error is None else {"status": FAILED, "error": _failure(error)})
        self._put(replace(self._begun, response=self._answer.response, rank=self._begun.rank + 1))

    def _put(self, kept: KeptResponse) -> None:
        self._shelf.put(kept, replaces=self._replaces)


def _failure(error: Exception) -> Json:
    """Returns the error that a failed response shows."""
    return {"code": "server_error", "message": to_http(error).message}


def _echoed(body: ResponsesBody) -> Json:
    """Returns what a response repeats of its request in full."""
    echoed = {
        "instructions": body.instructions,
        "metadata": body.metadata,
        "text": {"format": body.text.format or {"type": "text"}},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": list(body.tools),
    }
    return {name: echoed[name] for name in ECHOED}


def _response(body: ResponsesBody, request: SessionRequest, own_id: str) -> Json:
    """Returns a response before its first token."""
    sampling = request.sampling
    return {
        "id": own_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": IN_PROGRESS,
        "error": None,
        "incomplete_details": None,
        "max_output_tokens": body.max_output_tokens,
        "model": request.model.shown_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": body.store,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        **_echoed(body),
    }


def _begun(kept: KeptResponse) -> Json:
    """Returns a response as it was before its first token."""
    empty: Json = {"status": IN_PROGRESS, "output": [], "usage": None, "incomplete_details": None, "error": None}
    return {name: value for name, value in {**kept.response, **empty}.items() if name != "metrics"}


def _replayed(kept: KeptResponse, after: int) -> Iterator[Json]:
    """Yields the events of a response that has ended."""
    call_ids = [item["call_id"] for item in kept.response["output"] if item["type"] == "function_call"]
    answer = ResponseAnswer(_begun(kept), call_ids.__getitem__, after)
    yield from answer.opening()
    for part in parts_of(kept.response["output"]):
        yield from answer.further([part])
    answer.response |= {name: value for name, value in kept.response.items() if name != "output"}
    yield from answer.closing()


def _number(given: str | None) -> int:
    """Reads `starting_after`; -1: it is absent."""
    if given is None:
        return -1
    if not (given.isascii() and given.isdigit() and len(given) <= MAX_DIGITS):
        raise InvalidRequestError("starting_after", "must be the number of an event")
    return int(given)
