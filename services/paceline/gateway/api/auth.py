"""API keys before the HTTP application: what is refused never reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack, suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import OverloadedError, PacelineError
from paceline.gateway.access.doors import AUTHORIZATION, SCHEME, Access
from paceline.gateway.api.console.figures import FILE_PATHS
from paceline.gateway.http.response import OPENAI_ERRORS, ErrorForm, Exchange, request_id
from paceline.service.fair_shares import Shares, current_caller

# Where clients of Anthropic's API put the key.
API_KEY = "x-api-key"
# Load balancers ask for health before anything else, and have no key; nor has a browser that fetches the console's
# files, which reveal nothing about this fleet.
OPEN_PATHS = frozenset({"/health", "/livez", "/ping", "/readyz"}) | FILE_PATHS
# Operators who look what is wrong get in however many requests are under way; the answer takes a moment.
PLACELESS_PATHS = frozenset({"/metrics"})
# An answer without a key is small: a client that does not take it within this time is disconnected.
OPEN_TIMEOUT_S = 10.0


class GuardedApp:
    """An ASGI application behind API keys, whose holders share the places for requests.

    Refused requests never reach the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        access: Access | None,
        forms: Mapping[str, ErrorForm],
        requests: Shares,
        on_full: Callable[[PacelineError], None] = lambda _: None,
    ) -> None:
        """Takes over an application.

        Args:
            app: The application behind the keys.
            access: The keys; None: nobody needs one.
            forms: By path, how its API reports errors; the others do it as OpenAI's.
            requests: Places for requests that are read or answered.
            on_full: Called with the reason for every request that gets no place.
        """
        self._app = app
        self._access = access
        self._forms = forms
        self._requests = requests
        self._on_full = on_full

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # All but HTTP is refused by the server; a path is compared whole, so nothing can hide behind an open one.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in OPEN_PATHS:
            await _briefly(self._app(scope, receive, send))
        else:
            with ExitStack() as held:
                try:
                    await self._admit(scope, held)
                except PacelineError as error:
                    await _briefly(self._refuse(error, scope, send))
                    return
                await self._app(scope, receive, send)

    async def _admit(self, scope: Scope, held: ExitStack) -> None:
        """Makes the sender the current caller; puts what the request holds from now on onto a stack.

        Raises:
            UnauthenticatedError: There is no key, or it is unknown.
            OverloadedError: The key has used up its rate or its places.
        """
        if self._access is not None:
            await self._access.admit(_authorization(Headers(scope=scope)))
        if scope["path"] in PLACELESS_PATHS:
            return
        try:
            held.enter_context(self._requests.take(1, current_caller()))
        except OverloadedError as error:
            self._on_full(error)
            raise

    async def _refuse(self, error: PacelineError, scope: Scope, send: Send) -> None:
        form = self._forms.get(scope["path"], OPENAI_ERRORS)
        await Exchange(send, given_id=request_id(Headers(scope=scope)), form=form).fail(error)


async def _briefly(answering: Awaitable[None]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await answering


def _authorization(headers: Headers) -> str | None:
    """Returns the header that names the key, however it came."""
    given = headers.get(AUTHORIZATION)
    key = headers.get(API_KEY)
    return f"{SCHEME} {key}" if given is None and key is not None else given
