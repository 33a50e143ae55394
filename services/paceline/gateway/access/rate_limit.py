"""Counts the requests of each API key, over all gateways of a fleet, in the store they share.

A store that does not answer, or is full, never stops a request: nothing is counted for a while. Windows follow the
gateways' clocks, which have to agree. It knows neither HTTP nor gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import MovingWindowRateLimiter
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError

from paceline.core.errors import OverloadedError
from paceline.gateway.access.keys import ApiKey

PREFIX = "paceline:rate"
# A count takes a fraction of a millisecond; a request does not wait longer than this for one.
COUNT_TIMEOUT_S = 0.25
# A store that failed is left alone for this long.
REST_S = 5.0

ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


class RateLimit:
    """At most `requests_per_minute` in any 60 seconds, each key by itself.

    Args:
        redis_url: Where counts are kept; `memory://` keeps them in this process.
        timeout_s: Longest wait for the store.
        clock: Monotonic seconds.
    """

    def __init__(
        self, redis_url: str, *, timeout_s: float = COUNT_TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._rests_until_s: float | None = None
        self._pool: ConnectionPool | None = None
        storage: MemoryStorage | RedisStorage = MemoryStorage()
        if not redis_url.startswith("memory:"):
            # The URL is read by the pool alone, which knows all its forms.
            self._pool = ConnectionPool.from_url(
                redis_url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
            )
            options: dict[str, Any] = {"connection_pool": self._pool}
            storage = RedisStorage("redis://", implementation="redispy", key_prefix=PREFIX, **options)
        self._limiter = MovingWindowRateLimiter(storage)

    async def count(self, key: ApiKey) -> bool:
        """Counts one request; free for keys without a limit.

        Returns:
            Whether it was counted, and so can be given back.

        Raises:
            OverloadedError: The key has used up its requests of the last minute; names the wait.
        """
        if key.requests_per_minute is None:
            return False
        limit = RateLimitItemPerMinute(key.requests_per_minute)
        counted = await self._answered(lambda: self._limiter.hit(limit, key.name))
        if counted is False:
            window = await self._answered(lambda: self._limiter.get_window_stats(limit, key.name))
            raise OverloadedError(
                f"API key {key.name!r} has had its {key.requests_per_minute} requests per minute",
                retry_after_s=max(0.0, window.reset_time - time.time()) if window else 1.0,
            )
        return bool(counted)

    async def give_back(self, key: ApiKey) -> None:
        """Counts one request less, which was counted before; which one of a minute makes little difference."""
        if self._pool is not None and key.requests_per_minute is not None:
            name = f"{PREFIX}:{RateLimitItemPerMinute(key.requests_per_minute).key_for(key.name)}"
            client = Redis(connection_pool=self._pool)
            await self._answered(lambda: client.ltrim(name, 1, -1))

    async def close(self) -> None:
        """Closes the connections."""
        if self._pool is not None:
            await self._pool.aclose()

    async def _answered(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT | None:
        """Returns what the store answers; None: it does not, or is left alone since it did not."""
        if self._rests_until_s is not None and self._clock() < self._rests_until_s:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await ask()
        except (TimeoutError, RedisError, OSError, RuntimeError) as error:
            # uvloop raises RuntimeError for a write to a socket that has gone.
            if isinstance(error, ReadOnlyError) and self._pool is not None:
                # The name may lead to another server by now; a connection that is open does not.
                await self._pool.disconnect(inuse_connections=False)
            if self._rests_until_s is None:
                reason = type(error).__name__
                _log.warning("requests are not counted, the store does not answer", extra={"reason": reason})
            self._rests_until_s = self._clock() + REST_S
            return None
        if self._rests_until_s is not None:
            _log.info("requests are counted again")
            self._rests_until_s = None
        return answer
