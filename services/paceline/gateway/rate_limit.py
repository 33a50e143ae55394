"""Counts the requests of each API key, over all gateways of a fleet, in the store they share.

A store that does not answer never stops a request: then nothing is counted for a while. It knows neither HTTP nor gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import urlsplit

from limits import RateLimitItemPerMinute
from limits.aio.storage import MemoryStorage, RedisStorage
from limits.aio.strategies import MovingWindowRateLimiter
from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from paceline.core.errors import OverloadedError
from paceline.gateway.keys import ApiKey

KEY_PREFIX = "paceline:rate"
# A count takes a fraction of a millisecond; a request does not wait longer than this for one.
COUNT_TIMEOUT_S = 0.25
# How long a store that failed is left alone.
REST_S = 5.0

_log = logging.getLogger(__name__)


class RateLimit(Protocol):
    """Lets a key's requests pass, or does not."""

    async def count(self, key: ApiKey) -> None:
        """Counts one request.

        Raises:
            OverloadedError: The key has had its requests of the last minute; says when to come again.
        """


class WindowRateLimit:
    """At most `requests_per_minute` in any 60 seconds, each key by itself.

    Args:
        redis_url: Where counts are kept; `memory://` keeps them in this process.
        timeout_s: Longest wait for the store.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        redis_url: str,
        *,
        timeout_s: float = COUNT_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._pool: Any = None
        self._rests_until_s: float | None = None
        if urlsplit(redis_url).scheme == "memory":
            self._limiter = MovingWindowRateLimiter(MemoryStorage())
            return
        self._pool = ConnectionPool.from_url(
            redis_url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 1),
        )
        self._limiter = MovingWindowRateLimiter(
            # Without an implementation named, another client library is looked for.
            RedisStorage("async+redis://", implementation="redispy", key_prefix=KEY_PREFIX, connection_pool=self._pool)
        )

    async def count(self, key: ApiKey) -> None:
        """Counts one request; free for keys without a limit.

        Raises:
            OverloadedError: The key has had its requests of the last minute; says when to come again.
        """
        if key.requests_per_minute is None or self._rests():
            return
        item = RateLimitItemPerMinute(key.requests_per_minute)
        try:
            async with asyncio.timeout(self._timeout_s):
                if await self._limiter.hit(item, key.name):
                    self._answered()
                    return
                window = await self._limiter.get_window_stats(item, key.name)
        except (TimeoutError, RedisError, OSError, RuntimeError) as error:
            # uvloop raises RuntimeError for a write to a socket that has gone.
            self._failed(error)
            return
        # The window's end is wall-clock time, being shared by gateways.
        raise OverloadedError(
            f"API key {key.name!r} has had its {key.requests_per_minute} requests per minute",
            retry_after_s=max(0.0, window.reset_time - time.time()),
        )

    async def close(self) -> None:
        """Closes the connections."""
        if self._pool is not None:
            await self._pool.disconnect()

    def _rests(self) -> bool:
        return self._rests_until_s is not None and self._clock() < self._rests_until_s

    def _answered(self) -> None:
        if self._rests_until_s is not None:
            _log.info("requests are counted again")
            self._rests_until_s = None

    def _failed(self, error: Exception) -> None:
        if self._rests_until_s is None:
            reason = type(error).__name__
            _log.warning("requests are not counted, the store does not answer", extra={"reason": reason})
        self._rests_until_s = self._clock() + REST_S
