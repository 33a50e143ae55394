"""Wraps handlers of a gRPC server, whatever their kind; knows neither errors nor services."""

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
        handler: The method's.
        behaviour: That function.
        deserializer: Reads its requests; None: as before.
        request_streaming: Whether it takes requests as they come. gRPC receives the one message of any other before it
            calls the function, which then cannot refuse it; None: as before.
    """
    streaming = handler.request_streaming if request_streaming is None else request_streaming
    return _WRAPPERS[streaming, handler.response_streaming](
        behaviour,
        request_deserializer=deserializer or handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def inside(around: Around, behaviour: Any, read: Callable[[Any], Any] = lambda request: request) -> Any:
    """Returns a function that serves a call as another does, but inside a context manager.

    Args:
        around: Makes the context manager of the call's `grpc.aio.ServicerContext`.
        behaviour: That other function; None is returned for a synchronous one: none of ours.
        read: Is given the request, or the iterator of requests, and returns what the function gets for it.
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
    """Serves each call by another handler in the place of its own."""

    def wrap(self, handler: Any, method: str) -> Any:
        """Returns the handler to serve a call of a method with."""
        raise NotImplementedError

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call; a method that nobody serves has none."""
        handler = await continuation(handler_call_details)
        return None if handler is None else self.wrap(handler, handler_call_details.method)


class CheckInterceptor(WrappingInterceptor):
    """Awaits a check before every call but those of the health service; what it raises ends the call.

    The check runs in the task and context of the call, so a context variable that it sets is seen by the handler.

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
        # A synchronous handler would slip past what is awaited here; there is none, and none is let in.
        assert wrapped is not None, f"{method} is not asynchronous"
        return with_behaviour(handler, wrapped)

    @asynccontextmanager
    async def _checked(self, context: Any) -> AsyncIterator[None]:
        await self._check(context)
        yield
