"""One operation of an API over HTTP: from a request to an answer or an error; nothing is raised to the server.

It knows no API. What an operation does is a function that reads the request and returns the work that answers it.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import KW_ONLY, dataclass
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from paceline.gateway.api.endpoints.request_trace import RequestTrace, traced_request
from paceline.gateway.http.response import OPENAI_ERRORS, ErrorForm, Exchange, request_id, until_disconnect
from paceline.obs.tracing import OFF, TRACEPARENT, Tracer

Work = Coroutine[Any, Any, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request under way."""

    request: Request
    exchange: Exchange
    trace: RequestTrace


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An ASGI application.

    Attributes:
        handle: Reads the request; returns the work that answers it, which ends early when the client leaves.
        count_error: Called with the error that ends a request.
        id_prefix: What our names of requests begin with; empty: they get none.
        errors: How the API reports errors.
        tracer: Records the spans of requests, if tracing is on.
        operation: Name of these spans.
    """

    handle: Callable[[Call], Awaitable[Work]]
    _: KW_ONLY
    count_error: Callable[[Exception], None] = lambda _: None
    id_prefix: str = ""
    errors: ErrorForm = OPENAI_ERRORS
    tracer: Tracer = OFF
    operation: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        given_id = request_id(request.headers)
        with traced_request(self.tracer, self.operation, request.headers.get(TRACEPARENT, ""), given_id) as trace:
            exchange = Exchange(
                send,
                trace.fail,
                given_id=given_id,
                own_id=self.id_prefix and f"{self.id_prefix}{uuid.uuid4().hex}",
                form=self.errors,
            )
            try:
                work = await self.handle(Call(request=request, exchange=exchange, trace=trace))
                await until_disconnect(receive, work)
            except ClientDisconnect:
                # It left while it sent its body: no error of anybody, and nobody is there to be told.
                return
            except Exception as error:  # noqa: BLE001 - the edge: the client gets an answer, whatever happens
                self.count_error(error)
                await exchange.fail(error)
