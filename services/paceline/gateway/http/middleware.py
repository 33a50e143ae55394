"""ASGI middleware before the HTTP application: CORS, and a log line for each request.

It knows no paths and no keys.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.gateway.http.response import IGNORED_FIELDS, IGNORED_TOOLS, REQUEST_ID

logger = logging.getLogger(__name__)

# Headers of an answer that pages of other origins may read, beside its body.
EXPOSED = (REQUEST_ID, IGNORED_FIELDS, IGNORED_TOOLS, "retry-after")


def with_middleware(app: ASGIApp, *, allowed_origins: Sequence[str], access_log: bool) -> ASGIApp:
    """Returns an application with the layers that are switched on.

    Args:
        app: The application behind its keys: a preflight of a browser has none.
        allowed_origins: Origins whose pages may call it, `*` for all; none: no CORS.
        access_log: Whether each request is logged when its answer has ended.
    """
    if allowed_origins:
        app = CORSMiddleware(
            app, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED
        )
    return AccessLog(app) if access_log else app


class AccessLog:
    """Logs each HTTP request when its answer has ended: no bodies, no keys, no query.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, app: ASGIApp, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status, own_id = self._clock(), 0, ""

        async def watched(message: Message) -> None:
            nonlocal status, own_id
            if message["type"] == "http.response.start":
                status, own_id = message["status"], Headers(raw=message["headers"]).get(REQUEST_ID, "")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            client = scope.get("client")
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                # 0: the client left, or the server ended it, before there was an answer.
                "status": status,
                "seconds": round(self._clock() - started_s, 6),
                "request_id": own_id,
                "client": client[0] if client else "",
            }
            logger.info("request", extra=fields)
