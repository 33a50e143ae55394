"""The gRPC door: a call is admitted by its metadata alone, and only then is its message read, within bounds.

gRPC receives the message of a unary call before it reports the call. So every method is served as one that takes a
stream, whose messages are read on demand: a call that is refused has sent nothing but its metadata.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

from google.protobuf.message import DecodeError

from paceline.core.errors import InvalidRequestError, OverloadedError
from paceline.gateway.access.fair_shares import RETRY_AFTER_S, Held, Shares, current_caller
from paceline.gateway.api.grpc.messages import FIELD, check_message
from paceline.gateway.http.connection import SEND_TIMEOUT_S
from paceline.gateway.http.errors import ClientStalledError
from paceline.service.interceptors import HEALTH_METHODS, WrappingInterceptor, behaviour_of, with_behaviour

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
# Of a stream that is not read at the moment, so that calls that wait for their turn hold little.
UNREAD_BYTES = 64 * 1024
# Health checks need no key, so few of their messages are read at once: one more ends the read that has waited longest.
MAX_HEALTH_READS = 8
MAX_HEALTH_CALLS = 256
HEALTH_TIMEOUT_S = 5.0
# Of a connection without calls; clients reconnect when they need one.
MAX_IDLE_MS = 120_000
HANDSHAKE_TIMEOUT_MS = 10_000


def door_options(max_calls: int, connection_age_s: float = 0.0) -> tuple[tuple[str, int], ...]:
    """Returns the settings of a gRPC server that strangers can reach: limits of connections, and of calls on each.

    Args:
        connection_age_s: At which a connection takes no new calls; 0: none. gRPC's own grace for the calls under way,
            without limit, stays.
    """
    aging = (("grpc.max_connection_age_ms", round(1e3 * connection_age_s)),) if connection_age_s else ()
    return (
        *aging,
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", max_calls),
        ("grpc.max_allowed_incoming_connections", max_calls),
        ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # Otherwise a fast sender gets a window of megabytes that nobody reads.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
    )


class GrpcDoor(WrappingInterceptor):
    """Admits calls.

    Args:
        admit: Takes the metadata of a call, and makes its sender the current caller, or raises.
        calls: Places for calls.
        reading: Room for messages, held until the first answer.
        timeout_s: Time for a message to arrive, its turn included.
    """

    def __init__(
        self,
        admit: Callable[[Any], Awaitable[None]],
        *,
        calls: Shares,
        reading: Shares,
        timeout_s: float,
    ) -> None:
        self._admit = admit
        self._calls = calls
        self._reading = reading
        self._timeout_s = timeout_s
        self._health_calls = Turnover(MAX_HEALTH_CALLS)
        self._health_reads = Turnover(MAX_HEALTH_READS)

    def wrap(self, handler: Any, method: str) -> Any:
        """Lets a call in before its message is read."""
        serve = self._health(handler) if method.startswith(HEALTH_METHODS) else self._guarded(handler, method)
        return with_behaviour(handler, serve, _as_they_are, request_streaming=True)

    def _guarded(self, handler: Any, method: str) -> Any:
        async def serve(messages: AsyncIterator[bytes], context: Any) -> Any:
            await self._admit(context.invocation_metadata())
            with self._calls.take(1, current_caller()):
                if handler.request_streaming:
                    return await _answer(handler, self._each(handler, messages), context)
                with await self._received(messages) as message:
                    return await _answer(handler, message.parsed(handler, method), context, message.held)

        return serve

    def _health(self, handler: Any) -> Any:
        async def serve(messages: AsyncIterator[bytes], context: Any) -> Any:
            async with self._health_calls.place():
                async with self._health_reads.place(), _deadline(HEALTH_TIMEOUT_S):
                    request = _parse(handler, await _next(messages))
                return await _answer(handler, request, context)

        return serve

    async def _each(self, handler: Any, messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        """Yields the messages of a stream, each within the time limit."""
        while True:
            try:
                with await self._received(messages) as message:
                    request = message.parsed(handler, "")
            except _EndOfStreamError:
                return
            yield request

    async def _received(self, messages: AsyncIterator[bytes]) -> _Received:
        """Reserves room, then returns the next message."""
        try:
            async with asyncio.timeout(self._timeout_s):
                held = await self._reading.wait(MAX_MESSAGE_BYTES, current_caller())
        except TimeoutError:
            raise OverloadedError(
                f"no room to read a message came free within {self._timeout_s:g} s", retry_after_s=RETRY_AFTER_S
            ) from None
        async with AsyncExitStack() as stack:
            stack.callback(held.release)
            async with _deadline(self._timeout_s):
                data = await _next(messages)
            held.resize(len(data))
            stack.pop_all()
        return _Received(data, held)


class Turnover:
    """A limited number of places: one more holder ends the one that has been there longest."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._scopes: dict[asyncio.Timeout, None] = {}

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Holds a place while a block runs.

        Raises:
            OverloadedError: A later holder needed the place.
        """
        if len(self._scopes) >= self._limit:
            eldest = next(iter(self._scopes))
            del self._scopes[eldest]
            eldest.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes[scope] = None
                try:
                    yield
                finally:
                    self._scopes.pop(scope, None)
        except TimeoutError:
            raise OverloadedError(
                f"more than {self._limit} such calls came, this one had waited longest", retry_after_s=RETRY_AFTER_S
            ) from None


class _EndOfStreamError(InvalidRequestError):
    """The caller has sent its last message."""


class _Received:
    """A message and the room it takes; a context manager that frees the room."""

    def __init__(self, data: bytes, held: Held) -> None:
        self._data = data
        self.held = held

    def parsed(self, handler: Any, method: str) -> Any:
        """Parses the message; its bytes are dropped."""
        data, self._data = self._data, b""
        check_message(method, data)
        return _parse(handler, data)

    def __enter__(self) -> _Received:
        return self

    def __exit__(self, *_: object) -> None:
        self.held.release()


def _as_they_are(data: bytes) -> bytes:
    return data


def _parse(handler: Any, data: bytes) -> Any:
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        raise InvalidRequestError(FIELD, f"is not a message of this method: {error}") from None


async def _next(messages: AsyncIterator[bytes]) -> bytes:
    try:
        return await anext(messages)
    except StopAsyncIteration:
        raise _EndOfStreamError(FIELD, "the call ended without a message") from None


@asynccontextmanager
async def _deadline(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise InvalidRequestError(FIELD, f"did not arrive within {timeout_s:g} s") from None


async def _answer(handler: Any, request: Any, context: Any, held: Held | None = None) -> Any:
    """Serves a call; the room of its message is freed with the first answer.

    Raises:
        ClientStalledError: The client is there but reads nothing.
    """
    serving = behaviour_of(handler)(request, context)
    # Otherwise a stream would hold its request to its end.
    del request
    if inspect.isawaitable(serving):
        # It returns the answer; or, as health's Watch does, it writes its answers to the context.
        return await serving
    async with aclosing(serving) as responses:
        async for response in responses:
            if held is not None:
                held.release()
            try:
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await context.write(response)
            except TimeoutError:
                raise ClientStalledError(f"the client has read nothing for {SEND_TIMEOUT_S:g} s") from None
    return None
