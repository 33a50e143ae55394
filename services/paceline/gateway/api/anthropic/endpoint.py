"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from paceline.gateway.api.anthropic.bodies import THREAD, CountBody, MessagesBody
from paceline.gateway.api.anthropic.requests import generation_of, prompt_of
from paceline.gateway.api.anthropic.telling import MessageTelling
from paceline.gateway.api.endpoints.reading import BodyReader
from paceline.gateway.api.openai.bodies import ChatFields
from paceline.gateway.api.openai.choices import chat_tokens
from paceline.gateway.api.openai.tools import read_toolbox
from paceline.gateway.api.openai.translated import Asked
from paceline.gateway.http.errors import HttpError
from paceline.gateway.http.fields import UnknownFields, read_fields
from paceline.gateway.http.response import REQUEST_ID, ErrorForm, Exchange, request_id
from paceline.gateway.message.growing import Message
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.sessions.sessions import Sessions

Json = dict[str, Any]

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_BAD_REQUESTS = range(400, 500)


def error_shape(error: HttpError, request_id: str) -> Json:
    """Returns Anthropic's error object."""
    other = "invalid_request_error" if error.status in _BAD_REQUESTS else "api_error"
    told: Json = {"type": _ERROR_TYPES.get(error.status, other), "message": error.message}
    if error.param == THREAD:
        # The official client sends the whole conversation then.
        told["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": told, "request_id": request_id or None}


# The first header is where the official client looks.
ERRORS = ErrorForm(shape=error_shape, named=True, id_headers=("request-id", REQUEST_ID))


class MessagesDoor:
    """Anthropic's API."""

    id_prefix = "msg_"
    errors = ERRORS
    names: Mapping[str, str] = {
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "tool_choice.function": "tool_choice",
        "stop": "stop_sequences",
    }

    async def prepare(self, fields: Json) -> None:
        """Nothing has to be fetched."""
        del fields

    def understand(self, prepared: None, fields: Json, unknown: UnknownFields) -> Asked:
        """Reads a body."""
        del prepared
        body = read_fields(MessagesBody, fields, unknown)
        return Asked(chat=generation_of(body, unknown), stream=body.stream)

    def telling(self, asked: Asked, request: SessionRequest, message: Message, own_id: str) -> MessageTelling:
        """Returns what tells an answer."""
        del asked
        return MessageTelling(own_id, request.model.shown_name, len(request.prompt_token_ids), message)

    async def begun(self, asked: Asked, telling: MessageTelling, request: SessionRequest) -> None:
        """Nothing is kept."""

    async def ended(self, asked: Asked, telling: MessageTelling, request: SessionRequest) -> None:
        """Nothing is kept."""


class CountTokensEndpoint:
    """POST /v1/messages/count_tokens: a tokenizer and a chat template do all of it."""

    def __init__(self, sessions: Sessions, reader: BodyReader) -> None:
        self._sessions = sessions
        self._reader = reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; errors become error objects, nothing is raised to the server."""
        request = Request(scope, receive)
        own_id = f"tok-{uuid.uuid4().hex}"
        given = request_id(request.headers)
        exchange = Exchange(send, given_id=given, own_id=own_id, form=ERRORS)
        try:
            with self._sessions.errors_counted():
                answer = await self._reader.read(request, exchange, self._counted)
            await exchange.whole(answer)
        except Exception as error:  # noqa: BLE001 - the edge: whatever happens, the client is told
            await exchange.fail(error)

    def _counted(self, fields: Json, unknown: UnknownFields) -> Json:
        body = read_fields(CountBody, fields, unknown)
        chat = read_fields(ChatFields, prompt_of(body, unknown), unknown)
        tools = read_toolbox(chat.tools, None, True, unknown).tools
        return {"input_tokens": len(chat_tokens(chat, self._sessions.model(body.model), unknown, tools=tools))}
