"""Access checks between clients and the gateway at both doors: API keys and their rate limits.

An API key ends here; behind the doors only the name of its owner is known.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

from paceline.core.errors import PacelineError, UnauthenticatedError
from paceline.gateway.access.keys import KeyRing
from paceline.gateway.access.rate_limit import RateLimit
from paceline.service.fair_shares import Caller, set_current_caller
from paceline.service.supervision import TaskSupervisor

AUTHORIZATION = "authorization"
SCHEME = "bearer"

_log = logging.getLogger(__name__)


class Access:
    """Knows callers by their keys and counts their requests.

    Args:
        ring: The keys.
        rate_limit: Counts.
        on_refused: Called with the reason for every request that is refused.
    """

    def __init__(
        self, ring: KeyRing, rate_limit: RateLimit, on_refused: Callable[[PacelineError], None] = lambda _: None
    ) -> None:
        self._ring = ring
        self._rate_limit = rate_limit
        self._on_refused = on_refused

    async def admit(self, authorization: str | None) -> None:
        """Makes the sender of an `Authorization` header, if there is one, the current caller; counts its request.

        Raises:
            UnauthenticatedError: There is no such header, or no such key.
            OverloadedError: The key has used up its requests of the last minute.
        """
        try:
            set_current_caller(await self._caller(authorization))
        except PacelineError as error:
            self._on_refused(error)
            raise

    async def admit_call(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> None:
        """Does the same for a gRPC call."""
        values = [value for name, value in metadata or () if name == AUTHORIZATION]
        await self.admit(values[0] if len(values) == 1 and isinstance(values[0], str) else None)

    async def _caller(self, authorization: str | None) -> Caller:
        if authorization is None:
            raise UnauthenticatedError("an API key is required: send Authorization: Bearer KEY")
        scheme, _, presented = authorization.strip().partition(" ")
        if scheme.lower() != SCHEME or not presented.strip():
            raise UnauthenticatedError("the Authorization header must be: Bearer KEY")
        key = self._ring.find(presented.strip())
        if key is None:
            raise UnauthenticatedError("the API key is not known here")
        caller = Caller(name=key.name, max_sessions=key.max_sessions, num_keys=len(self._ring))
        counted = await self._rate_limit.count(key)
        return replace(caller, give_back=partial(self._rate_limit.give_back, key)) if counted else caller


@asynccontextmanager
async def guarded(
    ring: KeyRing | None,
    redis_url: str,
    on_refused: Callable[[PacelineError], None],
    supervisor: TaskSupervisor,
    *,
    plain_text: bool,
) -> AsyncIterator[Access | None]:
    """Asks callers for the keys of a ring, which stay fresh, while a block runs; yields None without a ring.

    Requests are counted at `redis_url`; `plain_text` says whether keys cross a network unencrypted.
    """
    if ring is None:
        yield None
        return
    rate_limit = RateLimit(redis_url)
    if plain_text:
        _log.warning("API keys and prompts cross the network in plain text; use --tls-cert, or a proxy that does TLS")
    try:
        async with supervisor.kept({"api_keys": ring.keep_fresh}):
            yield Access(ring, rate_limit, on_refused)
    finally:
        await rate_limit.close()
