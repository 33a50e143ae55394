"""The gRPC door: a call is admitted by its metadata alone, and only then is its message read, within bounds.

gRPC receives the message of a unary call before it reports the call. So every method is served as one that takes a
stream, whose messages are read on demand: a call that is refused has sent nothing but its metadata.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from google.protobuf.message import DecodeError

from paceline.core.errors import InvalidRequestError, OverloadedError
from paceline.gateway.http.connection import SEND_TIMEOUT_S
from paceline.gateway.http.errors import ClientStalledError
from paceline.service.fair_shares import RETRY_AFTER_S, EvictingLimit, Lease, Shares, current_caller
from paceline.service.interceptors import HEALTH_METHODS, WrappingInterceptor, behaviour_of, with_behaviour

# As gRPC's own default. The worst message of this size takes 0.15 s to parse; only callers with a key get that far.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024
FIELD = "request"
# Bytes of a stream that is not read at the moment, so that waiting calls hold little.
UNREAD_BYTES = 64 * 1024
# Health checks need no key, so few of their messages are read at once: one more ends the read that has waited longest.
MAX_HEALTH_READS = 8
MAX_HEALTH_CALLS = 256
HEALTH_TIMEOUT_S = 5.0
# Idle time of a connection without calls; clients reconnect when they need one.
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
        self._health_calls = EvictingLimit(MAX_HEALTH_CALLS, _end_now)
        self._health_reads = EvictingLimit(MAX_HEALTH_READS, _end_now)

    def wrap(self, handler: Any, method: str) -> Any:
        """Lets a call in before its message is read."""
        serve = self._health(handler) if method.startswith(HEALTH_METHODS) else self._guarded(handler)
        return with_behaviour(handler, serve, _as_they_are, request_streaming=True)

    def _guarded(self, handler: Any) -> Any:
        async def serve(messages: AsyncIterator[bytes], context: Any) -> Any:
            await self._admit(context.invocation_metadata())
            caller = current_caller()
            with self._calls.take(1, caller), self._reading.take(0, caller) as held:
                if handler.request_streaming:
                    return await _answer(handler, self._each(handler, messages, held), context, held)
                # Without a name, so that nothing holds the message once the answer has begun.
                return await _answer(handler, _parse(handler, await self._next(messages, held)), context, held)

        return serve

    def _health(self, handler: Any) -> Any:
        async def serve(messages: AsyncIterator[bytes], context: Any) -> Any:
            async with _place(self._health_calls):
                async with _place(self._health_reads), _deadline(HEALTH_TIMEOUT_S):
                    request = _parse(handler, await anext(messages, None))
                return await _answer(handler, request, context)

        return serve

    async def _each(self, handler: Any, messages: AsyncIterator[bytes], held: Lease) -> AsyncIterator[Any]:
        """Yields the messages of a stream, each within the time limit."""
        while (data := await self._next(messages, held)) is not None:
            yield _parse(handler, data)

    async def _next(self, messages: AsyncIterator[bytes], held: Lease) -> bytes | None:
        """Returns the next message, read as soon as there is room for it, which stays held; None: there is none."""
        held.release()
        try:
            async with asyncio.timeout(self._timeout_s):
                await held.wait(MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise OverloadedError(
                f"no room to read a message came free within {self._timeout_s:g} s", retry_after_s=RETRY_AFTER_S
            ) from None
        async with _deadline(self._timeout_s):
            data = await anext(messages, None)
        held.resize(len(data or b""))
        return data


@asynccontextmanager
async def _place(among: EvictingLimit[asyncio.Timeout]) -> AsyncIterator[None]:
    """Holds a place while a block runs.

    Raises:
        OverloadedError: A later holder needed the place.
    """
    try:
        async with asyncio.timeout(None) as scope:
            among.add(scope)
            try:
                yield
            finally:
                among.remove(scope)
    except TimeoutError:
        raise OverloadedError(
            f"more than {among.limit} such calls came, this one had waited longest", retry_after_s=RETRY_AFTER_S
        ) from None


def _end_now(scope: asyncio.Timeout) -> None:
    scope.reschedule(asyncio.get_running_loop().time())


def _as_they_are(data: bytes) -> bytes:
    return data


def _parse(handler: Any, data: bytes | None) -> Any:
    if data is None:
        raise InvalidRequestError(FIELD, "the call ended without a message")
    try:
        return handler.request_deserializer(data)
    except DecodeError as error:
        raise InvalidRequestError(FIELD, f"is not a message of this method: {error}") from None


@asynccontextmanager
async def _deadline(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise InvalidRequestError(FIELD, f"did not arrive within {timeout_s:g} s") from None


async def _answer(handler: Any, request: Any, context: Any, held: Lease | None = None) -> Any:
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
