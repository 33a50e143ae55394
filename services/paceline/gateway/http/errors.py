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
    PacelineError,
    PermissionDeniedError,
    RemoteProtocolError,
    ResumeMismatchError,
    SessionNotFoundError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
)

UNAUTHENTICATED_STATUS = 401
UNAVAILABLE_RETRY_AFTER_S = 1.0
INTERNAL_MESSAGE = "internal error; the server's log has the cause"

_log = logging.getLogger(__name__)


class BodyTooLargeError(InvalidRequestError):
    """The request body is larger than the limit."""


class BodyTimeoutError(InvalidRequestError):
    """The request body did not arrive in time."""


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
        """Returns OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_bytes(self) -> bytes:
        """Returns the error object in bytes; escapes keep broken text of the request out of the answer."""
        return json.dumps(self.to_json()).encode()

    def headers(self) -> dict[str, str]:
        """Returns the headers that belong to the status."""
        if self.status == UNAUTHENTICATED_STATUS:
            return {"WWW-Authenticate": "Bearer"}
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


_BAD_REQUESTS: tuple[tuple[type[PacelineError], int, str | None], ...] = (
    (BodyTooLargeError, 413, "body_too_large"),
    (BodyTimeoutError, 408, "body_timeout"),
    (InvalidRequestError, 400, None),
)


def to_http(error: Exception, request_id: str = "") -> HttpError:
    """Returns what the client is told; an unknown error is logged and told without its cause.

    Args:
        error: What ended the request.
        request_id: Its name in the log; empty: it has none.
    """
    logged = {"request_id": request_id} if request_id else {}
    message = str(error)
    if isinstance(error, InvalidRequestError):
        status, code = next((status, code) for kind, status, code in _BAD_REQUESTS if isinstance(error, kind))
        return HttpError(status=status, type="invalid_request_error", message=message, param=error.field, code=code)
    if isinstance(error, ModelNotFoundError):
        return HttpError(
            status=404, type="invalid_request_error", message=message, param="model", code="model_not_found"
        )
    if isinstance(error, SessionNotFoundError):
        return HttpError(status=404, type="invalid_request_error", message=message, code="session_not_found")
    if isinstance(error, ResumeMismatchError):
        return HttpError(status=409, type="invalid_request_error", message=message, code="resume_mismatch")
    if isinstance(error, EndsEnginesError):
        # No client should send it again by itself, as many do after a 5xx.
        return HttpError(status=422, type="invalid_request_error", message=message, code="request_ends_engines")
    if isinstance(error, UnauthenticatedError):
        return HttpError(
            status=UNAUTHENTICATED_STATUS, type="invalid_request_error", message=message, code="invalid_api_key"
        )
    if isinstance(error, OverloadedError):
        return HttpError(
            status=429,
            type="rate_limit_error",
            message=message,
            code="overloaded",
            retry_after_s=error.retry_after_s,
        )
    if isinstance(error, UnavailableError):
        return HttpError(
            status=503,
            type="service_unavailable_error",
            message=message,
            code="unavailable",
            retry_after_s=UNAVAILABLE_RETRY_AFTER_S,
        )
    if isinstance(error, StaleEpochError):
        return HttpError(status=409, type="invalid_request_error", message=message, code="session_taken_over")
    if isinstance(error, PermissionDeniedError):
        _log.error("a verifier refuses this gateway's certificate", exc_info=error, extra=logged)
        return HttpError(status=502, type="server_error", message=message, code="bad_upstream")
    if isinstance(error, RemoteProtocolError):
        _log.error("a verifier broke the protocol", exc_info=error, extra=logged)
        return HttpError(status=502, type="server_error", message=message, code="bad_upstream")
    _log.error("request failed", exc_info=error, extra=logged)
    return HttpError(status=500, type="server_error", message=INTERNAL_MESSAGE, code="internal_error")
