"""Who may come in, at both doors: API keys, their rate limits, and the name under which a request goes on.

The key itself ends here; behind the doors only the name of its owner is known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import PacelineError, UnauthenticatedError
from paceline.gateway.access.callers import Caller, become
from paceline.gateway.access.keys import KeyRing
from paceline.gateway.access.rate_limit import RateLimit
from paceline.gateway.http.connection import hold_connection
from paceline.gateway.http.response import LAST_EVENT_ID, OPENAI_ERRORS, ErrorForm, Exchange, request_id

AUTHORIZATION = "authorization"
# Where clients of Anthropic's API put the key.
API_KEY = "x-api-key"
SCHEME = "bearer"
# An answer without a key is small: who does not take it in that time is let go.
OPEN_TIMEOUT_S = 10.0
# What goes on with a session that was counted when it began.
RESUME = "/paceline.rpc.v1.Gateway/Resume"


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

    async def admit(self, authorization: str | None, *, counts: bool = True) -> None:
        """Makes the sender of an `Authorization` header the current caller.

        Args:
            authorization: The header; None: there is none.
            counts: Whether the request is counted against the rate of its key.

        Raises:
            UnauthenticatedError: There is no such header, or no such key.
            OverloadedError: The key has had its requests of the last minute.
        """
        try:
            become(await self._caller(authorization, counts=counts))
        except PacelineError as error:
            self._on_refused(error)
            raise

    async def admit_call(self, metadata: Iterable[tuple[str, str | bytes]] | None, method: str) -> None:
        """Does the same for a gRPC call; one that resumes a session costs no rate."""
        values = [value for name, value in metadata or () if name == AUTHORIZATION]
        presented = values[0] if len(values) == 1 and isinstance(values[0], str) else None
        await self.admit(presented, counts=method != RESUME)

    async def _caller(self, authorization: str | None, *, counts: bool) -> Caller:
        if authorization is None:
            raise UnauthenticatedError("an API key is required: send Authorization: Bearer KEY")
        scheme, _, presented = authorization.strip().partition(" ")
        if scheme.lower() != SCHEME or not presented.strip():
            raise UnauthenticatedError("the Authorization header must be: Bearer KEY")
        key = self._ring.find(presented.strip())
        if key is None:
            raise UnauthenticatedError("the API key is not known here")
        if counts:
            await self._rate_limit.count(key)
        return Caller(name=key.name, max_sessions=key.max_sessions, num_keys=len(self._ring))


class GuardedApp:
    """An ASGI application behind API keys; what is refused never reaches it.

    A connection whose request was let in is told so (`paceline.gateway.http.connection`): it is not closed for others.
    """

    def __init__(
        self, app: ASGIApp, access: Access | None, forms: Mapping[str, ErrorForm], open_paths: Container[str]
    ) -> None:
        """Serves nobody yet.

        Args:
            app: What is behind the keys.
            access: The keys; None: nobody is asked for one.
            forms: By path, how its API tells errors; the others do as OpenAI's.
            open_paths: Those that need no key.
        """
        self._app = app
        self._access = access
        self._forms = forms
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or answers why not."""
        # All but HTTP is refused by the server; a path is compared whole, so nothing can hide behind an open one.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in self._open_paths:
            with suppress(TimeoutError):
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await self._app(scope, receive, send)
        elif (refusal := await self._refusal(headers := Headers(scope=scope))) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    form = self._forms.get(scope["path"], OPENAI_ERRORS)
                    await Exchange(send, given_id=request_id(headers), form=form).fail(refusal)
        else:
            hold_connection(scope)
            await self._app(scope, receive, send)

    async def _refusal(self, headers: Headers) -> PacelineError | None:
        if self._access is None:
            return None
        try:
            await self._access.admit(_authorization(headers), counts=LAST_EVENT_ID not in headers)
        except PacelineError as error:
            return error
        return None


def _authorization(headers: Headers) -> str | None:
    """Returns the header that names the key, however it came."""
    given = headers.get(AUTHORIZATION)
    key = headers.get(API_KEY)
    return f"{SCHEME} {key}" if given is None and key is not None else given
