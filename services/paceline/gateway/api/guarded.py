"""API keys before the HTTP application: what is refused never reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.core.errors import PacelineError
from paceline.gateway.access.doors import AUTHORIZATION, SCHEME, Access
from paceline.gateway.api.console.pages import FILE_PATHS
from paceline.gateway.http.connection import hold_connection
from paceline.gateway.http.response import OPENAI_ERRORS, ErrorForm, Exchange, request_id

# Where clients of Anthropic's API put the key.
API_KEY = "x-api-key"
# Load balancers ask for health before anything else, and have no key; nor has a browser that fetches the console's
# files, which reveal nothing about this fleet.
OPEN_PATHS = frozenset({"/health", "/livez", "/ping", "/readyz"}) | FILE_PATHS
# An answer without a key is small: a client that does not take it within this time is disconnected.
OPEN_TIMEOUT_S = 10.0


class GuardedApp:
    """An ASGI application behind API keys; what is refused never reaches it.

    A connection whose request was admitted is marked (`paceline.gateway.http.connection`): it is not closed for others.
    """

    def __init__(self, app: ASGIApp, access: Access | None, forms: Mapping[str, ErrorForm]) -> None:
        """Takes over an application.

        Args:
            app: What is behind the keys.
            access: The keys; None: nobody needs one.
            forms: By path, how its API reports errors; the others do it as OpenAI's.
        """
        self._app = app
        self._access = access
        self._forms = forms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, or answers why not."""
        # All but HTTP is refused by the server; a path is compared whole, so nothing can hide behind an open one.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in OPEN_PATHS:
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
            await self._access.admit(_authorization(headers))
        except PacelineError as error:
            return error
        return None


def _authorization(headers: Headers) -> str | None:
    """Returns the header that names the key, however it came."""
    given = headers.get(AUTHORIZATION)
    key = headers.get(API_KEY)
    return f"{SCHEME} {key}" if given is None and key is not None else given
