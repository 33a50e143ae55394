"""Gives errors their HTTP status and OpenAI's error object; the one place in the gateway that does."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    type: str = "invalid_request_error"
    message: str = ""
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


_BAD_UPSTREAM = HttpError(status=502, code="bad_upstream", type="server_error")
# Errors without their messages; the first type that fits counts.
_FORMS: tuple[tuple[type[Exception], HttpError], ...] = (
    (BodyTooLargeError, HttpError(status=413, code="body_too_large")),
    (BodyTimeoutError, HttpError(status=408, code="body_timeout")),
    (BodyEncodingError, HttpError(status=UNSUPPORTED_STATUS, code="body_encoding")),
    (InvalidRequestError, HttpError(status=400)),
    (ModelNotFoundError, HttpError(status=404, code="model_not_found", param="model")),
    (SessionNotFoundError, HttpError(status=404, code="session_not_found")),
    (ResumeMismatchError, HttpError(status=409, code="resume_mismatch")),
    # No client should send it again by itself, as many do after a 5xx.
    (EndsEnginesError, HttpError(status=422, code="request_ends_engines")),
    (UnauthenticatedError, HttpError(status=UNAUTHENTICATED_STATUS, code="invalid_api_key")),
    (OverloadedError, HttpError(status=429, code="overloaded", type="rate_limit_error")),
    (
        UnavailableError,
        HttpError(
            status=503, code="unavailable", type="service_unavailable_error", retry_after_s=UNAVAILABLE_RETRY_AFTER_S
        ),
    ),
    (StaleEpochError, HttpError(status=409, code="session_taken_over")),
    (PermissionDeniedError, _BAD_UPSTREAM),
    (RemoteProtocolError, _BAD_UPSTREAM),
    (Exception, HttpError(status=500, code="internal_error", type="server_error", message=INTERNAL_MESSAGE)),
)
_LOGGED: Mapping[type[Exception], str] = {
    PermissionDeniedError: "a verifier refuses this gateway's certificate",
    RemoteProtocolError: "a verifier broke the protocol",
    Exception: "request failed",
}


def to_http(error: Exception, request_id: str = "") -> HttpError:
    """Returns what the client gets; an unknown error is logged, and its cause stays in the log.

    Args:
        error: The error that ended the request.
        request_id: Its name in the log; empty: it has none.
    """
    kind, form = next((kind, form) for kind, form in _FORMS if isinstance(error, kind))
    if kind in _LOGGED:
        _log.error(_LOGGED[kind], exc_info=error, extra={"request_id": request_id} if request_id else {})
    return replace(
        form,
        message=form.message or str(error),
        param=error.field if isinstance(error, InvalidRequestError) else form.param,
        retry_after_s=error.retry_after_s if isinstance(error, OverloadedError) else form.retry_after_s,
    )
