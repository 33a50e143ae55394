"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.anthropic.answer import MessageAnswer
from paceline.gateway.api.anthropic.bodies import THREAD, CountBody, MessagesBody
from paceline.gateway.api.anthropic.requests import generation_of, prompt_of
from paceline.gateway.api.openai.bodies import ChatFields
from paceline.gateway.api.openai.prompts import chat_tokens
from paceline.gateway.api.openai.tools import read_toolbox
from paceline.gateway.api.openai.translated import Translated, TranslatedEndpoint, renamed
from paceline.gateway.http.errors import HttpError
from paceline.gateway.http.fields import UnknownFields, read_fields
from paceline.gateway.http.response import REQUEST_ID, ErrorForm
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
    body: Json = {"type": _ERROR_TYPES.get(error.status, other), "message": error.message}
    if error.param == THREAD:
        # The official client sends the whole conversation then.
        body["details"] = {"error_code": "thread_unsupported_request"}
    return {"type": "error", "error": body, "request_id": request_id or None}


# The first header is where the official client looks.
ERRORS = ErrorForm(
    shape=error_shape,
    named=True,
    id_headers=("request-id", REQUEST_ID),
    ping=b'event: ping\ndata: {"type":"ping"}\n\n',
)


class MessagesEndpoint(TranslatedEndpoint):
    """Anthropic's API."""

    names: ClassVar[Mapping[str, str]] = {
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "tool_choice.function": "tool_choice",
        "stop": "stop_sequences",
    }

    @override
    def translate(self, prepared: Any, fields: Json, unknown: UnknownFields) -> Translated:
        body = read_fields(MessagesBody, fields, unknown)
        chat, places = generation_of(body, unknown)
        return Translated(chat=chat, places=places, stream=body.stream)

    @override
    def answer(self, translated: Translated, request: SessionRequest, message: Message, own_id: str) -> MessageAnswer:
        return MessageAnswer(own_id, request.model.shown_name, len(request.prompt_token_ids), message)


def count_tokens(sessions: Sessions, fields: Json, unknown: UnknownFields) -> Json:
    """Returns the number of tokens of a prompt, for /v1/messages/count_tokens.

    Raises:
        InvalidRequestError: A field is wrong, or there are more tokens than the context holds.
    """
    body = read_fields(CountBody, fields, unknown)
    prompt, places = prompt_of(body, unknown)
    try:
        chat = read_fields(ChatFields, prompt, unknown)
        tools = read_toolbox(chat.tools, None, True, unknown).tools
        return {"input_tokens": len(chat_tokens(chat, sessions.model(body.model), unknown, tools=tools))}
    except InvalidRequestError as error:
        raise renamed(error, MessagesEndpoint.names, places) from None
