"""Wraps handlers of a gRPC server, of all four kinds; knows neither errors nor services."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from typing import Any

import grpc

HEALTH_METHODS = "/grpc.health.v1.Health/"

Around = Callable[[Any], AbstractAsyncContextManager[None]]

_WRAPPERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def behaviour_of(handler: Any) -> Any:
    """Returns the function that serves the call."""
    return handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream


def with_behaviour(
    handler: Any,
    behaviour: Any,
    deserializer: Callable[[bytes], Any] | None = None,
    *,
    request_streaming: bool | None = None,
) -> Any:
    """Returns the handler with another function to serve the call.

    Args:
        deserializer: Reads its requests; None: as before.
        request_streaming: Whether it takes a stream of requests. If not, gRPC receives the message before it calls the
            function, which then cannot refuse it. None: as before.
    """
    streaming = handler.request_streaming if request_streaming is None else request_streaming
    return _WRAPPERS[streaming, handler.response_streaming](
        behaviour,
        request_deserializer=deserializer or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def inside(around: Around, behaviour: Any, read: Callable[[Any], Any] = lambda request: request) -> Any:
    """Returns a function that serves a call inside a context manager.

    Args:
        around: Makes the context manager of the call's `grpc.aio.ServicerContext`.
        behaviour: Serves the call; the result is None for a synchronous function, which only gRPC itself has.
        read: Turns the request, or the iterator of requests, into the one that `behaviour` gets.
    """
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with around(context), aclosing(behaviour(read(request), context)) as responses:
                async for response in responses:
                    yield response

        return stream
    if not inspect.iscoroutinefunction(behaviour):
        return None

    async def call(request: Any, context: Any) -> Any:
        async with around(context):
            return await behaviour(read(request), context)

    return call


class WrappingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in stubs only
    """Replaces the handler of each call."""

    def wrap(self, handler: Any, method: str) -> Any:
        """Returns the handler that serves a call of a method."""
        raise NotImplementedError

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call; unknown methods have none."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self.wrap(handler, handler_call_details.method)


class CheckInterceptor(WrappingInterceptor):
    """Awaits a check before every call except those of the health service; an error in it ends the call.

    The check runs in the task and context of the call, so the handler sees context variables that it sets.

    Args:
        check: Is given the call's `grpc.aio.ServicerContext`.
    """

    def __init__(self, check: Callable[[Any], Awaitable[None]]) -> None:
        self._check = check

    def wrap(self, handler: Any, method: str) -> Any:
        """Checks before the handler runs."""
        if method.startswith(HEALTH_METHODS):
            return handler
        wrapped = inside(self._checked, behaviour_of(handler))
        # A synchronous handler would escape the check.
        assert wrapped is not None, f"{method} is not asynchronous"
        return with_behaviour(handler, wrapped)

    @asynccontextmanager
    async def _checked(self, context: Any) -> AsyncIterator[None]:
        await self._check(context)
        yield
