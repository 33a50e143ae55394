"""Maps error types to gRPC status codes with rich details, and status codes back to error types.

Both directions are side by side so that they stay inverse. `paceline.service.process` installs the interceptor.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from paceline.core.errors import (
    ConfigError,
    EndsEnginesError,
    EngineDiedError,
    InvalidRequestError,
    ModelNotFoundError,
    MovedError,
    OverloadedError,
    PacelineError,
    PeerLostError,
    PermissionDeniedError,
    RemoteProtocolError,
    ResumeMismatchError,
    SessionNotFoundError,
    StaleEpochError,
    UnauthenticatedError,
    UnavailableError,
    shortened,
)
from paceline.service.interceptors import WrappingInterceptor, behaviour_of, inside, with_behaviour

DETAILS_KEY = "grpc-status-details-bin"
# Text that generated servicers raise for missing methods.
NOT_SERVED = "Method not implemented!"
INTERNAL_MESSAGE = "internal error; the server's log has the cause"
# Status and details travel as headers; a client drops a call whose headers exceed 8 KiB, escapes included.
MAX_MESSAGE_CHARS = 256
MAX_FIELD_CHARS = 64
# No peer of ours asks for a longer pause, and a client gets it unchanged.
MAX_RETRY_AFTER_S = 3600.0
# In gRPC's status of a call whose answer is above the caller's limit.
_ITS_MESSAGE = "CLIENT: Received message larger than max"
# Text of gRPC's client, now and then, for a stream refused while it still writes: the status itself is lost.
_STATUS_LOST = "Internal error from Core"

_CODES: tuple[tuple[type[PacelineError], grpc.StatusCode], ...] = (
    (InvalidRequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (RemoteProtocolError, grpc.StatusCode.INVALID_ARGUMENT),
    (ModelNotFoundError, grpc.StatusCode.NOT_FOUND),
    (SessionNotFoundError, grpc.StatusCode.NOT_FOUND),
    (StaleEpochError, grpc.StatusCode.ABORTED),
    (EndsEnginesError, grpc.StatusCode.FAILED_PRECONDITION),
    (ResumeMismatchError, grpc.StatusCode.FAILED_PRECONDITION),
    (OverloadedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError, grpc.StatusCode.UNAVAILABLE),
    (ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnauthenticatedError, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDeniedError, grpc.StatusCode.PERMISSION_DENIED),
)
# Types that share a status code with another, or with gRPC's own errors; the details name them.
_REASONS: dict[str, type[PacelineError]] = {
    "ENGINE_DIED": EngineDiedError,
    "MOVED": MovedError,
    "REQUEST_ENDS_ENGINES": EndsEnginesError,
    "RESUME_MISMATCH": ResumeMismatchError,
    "SESSION_NOT_FOUND": SessionNotFoundError,
    # Last, as it is the base of others.
    "UNAVAILABLE": UnavailableError,
}
_DOMAIN = "paceline"
# Type of an error by its status, if its details name none of these.
_TYPES: dict[grpc.StatusCode, type[PacelineError]] = {
    grpc.StatusCode.ABORTED: StaleEpochError,
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: UnavailableError,
    grpc.StatusCode.FAILED_PRECONDITION: ConfigError,
    grpc.StatusCode.NOT_FOUND: ModelNotFoundError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    # Not sent by a service of ours.
    grpc.StatusCode.UNAVAILABLE: PeerLostError,
}

_log = logging.getLogger(__name__)


class ErrorInterceptor(WrappingInterceptor):
    """Ends a call with the status of the error its handler raised; unknown errors are logged as INTERNAL."""

    def wrap(self, handler: Any, method: str) -> Any:
        """Wraps a handler of any kind; gRPC's own synchronous ones raise no error of ours."""
        checked = _checked_stream if handler.request_streaming else _checked
        wrapped = inside(partial(_errors_mapped, method), behaviour_of(handler), checked)
        return handler if wrapped is None else with_behaviour(handler, wrapped, _lenient(handler.request_deserializer))


def error_from_rpc(error: grpc.aio.AioRpcError) -> PacelineError:
    """Returns the error that the callee raised, as far as its status shows.

    A status that cannot be read breaks the protocol, like any other message of a peer.
    """
    try:
        return _error_from_rpc(error)
    except (DecodeError, ValueError, OverflowError) as problem:
        return RemoteProtocolError(f"{error.code().name}: its details cannot be read: {problem}")


def _error_from_rpc(error: grpc.aio.AioRpcError) -> PacelineError:
    code, message = error.code(), error.details() or error.code().name
    details = _details(error)
    named = error_details_pb2.ErrorInfo()
    if _unpack(details, named) and named.domain == _DOMAIN and named.reason in _REASONS:
        return _REASONS[named.reason](message)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        bad_request = error_details_pb2.BadRequest()
        if _unpack(details, bad_request) and bad_request.field_violations:
            violation = bad_request.field_violations[0]
            return InvalidRequestError(violation.field, violation.description)
        return RemoteProtocolError(message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        retry = error_details_pb2.RetryInfo()
        if _unpack(details, retry):
            seconds = retry.retry_delay.ToTimedelta().total_seconds()
            return OverloadedError(message, retry_after_s=min(max(0.0, seconds), MAX_RETRY_AFTER_S))
        # gRPC's own status for a message above its limit; a retry would not help, unless it is the callee's.
        return RemoteProtocolError(message) if _ITS_MESSAGE in message else InvalidRequestError("request", message)
    if code in _TYPES:
        return _TYPES[code](message)
    if message == _STATUS_LOST:
        return PeerLostError("the stream was refused, and gRPC has lost the reason")
    return PacelineError(f"{code.name}: {message}")


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for bytes that are not a message of the method's type."""

    problem: str


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns a deserializer that passes on what it cannot read; if it raised, gRPC would answer UNKNOWN."""

    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError as error:
            return _Undecodable(str(error))

    return decode


def _checked(request: Any) -> Any:
    if isinstance(request, _Undecodable):
        raise InvalidRequestError("request", f"is not a message of this method: {request.problem}")
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


@asynccontextmanager
async def _errors_mapped(method: str, context: Any) -> AsyncIterator[None]:
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:  # noqa: BLE001 - the one place that handles unknown errors
        await _abort(context, error, method)


async def _abort(context: Any, error: Exception, method: str) -> NoReturn:
    if isinstance(error, NotImplementedError) and str(error) == NOT_SERVED:
        # A generated servicer lacks it, as health's `List`: anybody may ask for it.
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this method is not served")
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    if code is grpc.StatusCode.INTERNAL:
        _log.error("call failed", extra={"method": method}, exc_info=error)
        await context.abort(code, INTERNAL_MESSAGE)
    message = shortened(str(error), MAX_MESSAGE_CHARS)
    detail = _detail_of(error)
    metadata: tuple[tuple[str, bytes], ...] = ()
    if detail is not None:
        rich = status_pb2.Status(code=code.value[0], message=message)
        rich.details.add().Pack(detail)
        metadata = ((DETAILS_KEY, rich.SerializeToString()),)
    await context.abort(code, message, metadata)
    raise AssertionError("abort returned")


def _detail_of(error: Exception) -> Message | None:
    if isinstance(error, InvalidRequestError):
        bad_request = error_details_pb2.BadRequest()
        bad_request.field_violations.add(field=shortened(error.field, MAX_FIELD_CHARS), description=error.problem)
        return cast(Message, bad_request)
    if isinstance(error, OverloadedError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        return cast(Message, retry)
    reason = next((name for name, kind in _REASONS.items() if isinstance(error, kind)), None)
    return None if reason is None else cast(Message, error_details_pb2.ErrorInfo(reason=reason, domain=_DOMAIN))


def _details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    rich = status_pb2.Status()
    metadata = cast(Iterable[tuple[str, str | bytes]], error.trailing_metadata() or ())
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            rich.ParseFromString(value)
    return rich


def _unpack(rich: status_pb2.Status, target: Message) -> bool:
    return any(entry.Unpack(target) for entry in rich.details)
