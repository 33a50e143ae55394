"""Gives errors their HTTP status and OpenAI's error object; the one place in the gateway that does."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import (
    EndsEnginesError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    PermissionDeniedError,
    RemoteProtocolError,
    ResumeMismatchError,
    SessionNotFoundError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
)

UNAUTHENTICATED_STATUS, UNSUPPORTED_STATUS = 401, 415
UNAVAILABLE_RETRY_AFTER_S = 1.0
INTERNAL_MESSAGE = "internal error; the server's log has the cause"

_log = logging.getLogger(__name__)


class BodyTooLargeError(InvalidRequestError):
    """The request body is larger than the limit."""


class BodyTimeoutError(InvalidRequestError):
    """The request body did not arrive in time."""


class BodyEncodingError(InvalidRequestError):
    """The request body is compressed."""


class ClientStalledError(UnavailableError):
    """The client is there and does not read its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpError:
    """An error as an HTTP client sees it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_bytes(self) -> bytes:
        """Returns the error object in bytes; escapes keep broken text of the request out of the answer."""
        return json.dumps(self.to_json()).encode()

    def headers(self) -> dict[str, str]:
        if self.status == UNAUTHENTICATED_STATUS:
            return {"WWW-Authenticate": "Bearer"}
        if self.status == UNSUPPORTED_STATUS:
            return {"Accept-Encoding": "identity"}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


@dataclass(frozen=True, slots=True)
class _Form:
    """How errors of a type are reported.

    Attributes:
        code: OpenAI's `code`.
        type: OpenAI's `type`.
        param: OpenAI's `param`, where the error names no field of its own.
        logged: Line for the log; empty: none.
    """

    status: int
    code: str | None = None
    type: str = "invalid_request_error"
    param: str | None = None
    logged: str = ""


# The first that fits counts.
_FORMS: tuple[tuple[type[Exception], _Form], ...] = (
    (BodyTooLargeError, _Form(413, "body_too_large")),
    (BodyTimeoutError, _Form(408, "body_timeout")),
    (BodyEncodingError, _Form(UNSUPPORTED_STATUS, "body_encoding")),
    (InvalidRequestError, _Form(400)),
    (ModelNotFoundError, _Form(404, "model_not_found", param="model")),
    (SessionNotFoundError, _Form(404, "session_not_found")),
    (ResumeMismatchError, _Form(409, "resume_mismatch")),
    # No client should send it again by itself, as many do after a 5xx.
    (EndsEnginesError, _Form(422, "request_ends_engines")),
    (UnauthenticatedError, _Form(UNAUTHENTICATED_STATUS, "invalid_api_key")),
    (OverloadedError, _Form(429, "overloaded", "rate_limit_error")),
    (UnavailableError, _Form(503, "unavailable", "service_unavailable_error")),
    (StaleEpochError, _Form(409, "session_taken_over")),
    (
        PermissionDeniedError,
        _Form(502, "bad_upstream", "server_error", logged="a verifier refuses this gateway's certificate"),
    ),
    (RemoteProtocolError, _Form(502, "bad_upstream", "server_error", logged="a verifier broke the protocol")),
    (Exception, _Form(500, "internal_error", "server_error", logged="request failed")),
)


def to_http(error: Exception, request_id: str = "") -> HttpError:
    """Returns what the client gets; an unknown error is logged, and its cause stays in the log.

    Args:
        error: The error that ended the request.
        request_id: Its name in the log; empty: it has none.
    """
    kind, form = next((kind, form) for kind, form in _FORMS if isinstance(error, kind))
    if form.logged:
        _log.error(form.logged, exc_info=error, extra={"request_id": request_id} if request_id else {})
    retry_after_s = UNAVAILABLE_RETRY_AFTER_S if kind is UnavailableError else None
    return HttpError(
        status=form.status,
        type=form.type,
        message=INTERNAL_MESSAGE if kind is Exception else str(error),
        param=error.field if isinstance(error, InvalidRequestError) else form.param,
        code=form.code,
        retry_after_s=error.retry_after_s if isinstance(error, OverloadedError) else retry_after_s,
    )
