"""Who may come in, at both doors: API keys, their rate limits, and the name under which a request goes on.

The key itself ends here; behind the doors only the name of its owner is known.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import PacelineError, UnauthenticatedError
from paceline.gateway.callers import Caller, become
from paceline.gateway.console.pages import FILE_PATHS
from paceline.gateway.errors import to_http
from paceline.gateway.keys import KeyRing
from paceline.gateway.rate_limit import RateLimit
from paceline.interceptors import CheckInterceptor

AUTHORIZATION = "authorization"
SCHEME = "bearer"
# Load balancers ask for health before anything else, and have no key; nor has a browser that fetches the console's
# files, which say nothing of this fleet.
OPEN_PATHS = frozenset({"/health"}) | FILE_PATHS


class Access:
    """Knows callers by their keys and counts their requests.

    Args:
        ring: The keys.
        rate_limit: Counts.
        on_refused: Told of every request that may not come in.
    """

    def __init__(
        self, ring: KeyRing, rate_limit: RateLimit, on_refused: Callable[[PacelineError], None] = lambda _: None
    ) -> None:
        self._ring = ring
        self._rate_limit = rate_limit
        self._on_refused = on_refused

    async def admit(self, authorization: str | None) -> None:
        """Makes the sender of an `Authorization` header the current caller.

        Raises:
            UnauthenticatedError: There is no such header, or no such key.
            OverloadedError: The key has had its requests of the last minute.
        """
        try:
            become(await self._caller(authorization))
        except PacelineError as error:
            self._on_refused(error)
            raise

    async def _caller(self, authorization: str | None) -> Caller:
        if authorization is None:
            raise UnauthenticatedError("an API key is required: send Authorization: Bearer KEY")
        scheme, _, presented = authorization.strip().partition(" ")
        if scheme.lower() != SCHEME or not presented.strip():
            raise UnauthenticatedError("the Authorization header must be: Bearer KEY")
        key = self._ring.find(presented.strip())
        if key is None:
            raise UnauthenticatedError("the API key is not known here")
        await self._rate_limit.count(key)
        return Caller(name=key.name, max_sessions=key.max_sessions, num_keys=len(self._ring))

    def interceptor(self) -> CheckInterceptor:
        """Returns what asks every gRPC call but health for its key."""

        async def check(context: Any) -> None:
            values = [value for name, value in context.invocation_metadata() or () if name == AUTHORIZATION]
            await self.admit(values[0] if len(values) == 1 and isinstance(values[0], str) else None)

        return CheckInterceptor(check)


class GuardedApp:
    """An ASGI application behind `admit`; what is refused never reaches it."""

    def __init__(self, app: ASGIApp, admit: Callable[[str | None], Awaitable[None]]) -> None:
        self._app = app
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or answers why not."""
        # All but HTTP is refused by the server; a path is compared whole, so nothing can hide behind an open one.
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                await self._admit(Headers(scope=scope).get(AUTHORIZATION))
            except PacelineError as error:
                described = to_http(error)
                response = Response(
                    described.to_bytes(),
                    status_code=described.status,
                    headers=described.headers(),
                    media_type="application/json",
                )
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
