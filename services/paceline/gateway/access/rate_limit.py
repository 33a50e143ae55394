"""Counts the requests of each API key, over all gateways of a fleet, in the store they share.

A store that does not answer never stops a request: nothing is counted for a while. It knows neither HTTP nor gRPC.

Windows follow one clock, the store's, whatever the gateways' own clocks show. Libraries offer counters that expire
instead; those let twice the limit pass within a minute, because they keep only the window in which a request came.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError

from paceline.core.errors import OverloadedError
from paceline.gateway.access.keys import ApiKey

KEY_PREFIX = "paceline:rate:"
WINDOW_S = 60.0
# A count takes a fraction of a millisecond; a request does not wait longer than this for one.
COUNT_TIMEOUT_S = 0.25
# A store that failed is left alone for this long.
REST_S = 5.0

# Keeps the times of the last requests that passed, newest first, in milliseconds of the server's clock; returns how
# long the next one has to wait. The limit bounds their number, so a server that is out of memory may still write them.
# A time in the future was written before the clock was set back, or by a server with another clock.
_COUNT_SCRIPT = """#!lua flags=allow-oom
local limit, window_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
if now_ms < tonumber(redis.call('LINDEX', KEYS[1], 0) or 0) then redis.call('DEL', KEYS[1]) end
local oldest_ms = tonumber(redis.call('LINDEX', KEYS[1], limit - 1) or -window_ms)
if now_ms < oldest_ms + window_ms then return oldest_ms + window_ms - now_ms end
redis.call('LPUSH', KEYS[1], string.format('%d', now_ms))
redis.call('LTRIM', KEYS[1], 0, limit - 1)
redis.call('PEXPIRE', KEYS[1], window_ms)
return 0
"""

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
        in_memory = urlsplit(redis_url).scheme == "memory"
        self._window = _MemoryWindow(clock) if in_memory else _StoreWindow(redis_url, timeout_s)

    async def count(self, key: ApiKey) -> bool:
        """Counts one request; free for keys without a limit.

        Returns:
            Whether it was counted, and so can be given back.

        Raises:
            OverloadedError: The key has used up its requests of the last minute; names the wait.
        """
        if key.requests_per_minute is None:
            return False
        wait_s = await self._answered(self._window.wait_s, key.name, key.requests_per_minute)
        if wait_s:
            raise OverloadedError(
                f"API key {key.name!r} has had its {key.requests_per_minute} requests per minute",
                retry_after_s=wait_s,
            )
        return wait_s is not None

    async def give_back(self, key: ApiKey) -> None:
        """Counts one request less, which was counted before."""
        await self._answered(self._window.give_back, key.name)

    async def _answered(self, ask: Callable[..., Awaitable[ResultT]], *arguments: Any) -> ResultT | None:
        """Returns what the store answers; None: it does not, or is left alone since it did not."""
        if self._rests_until_s is not None and self._clock() < self._rests_until_s:
            return None
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await ask(*arguments)
        except (TimeoutError, RedisError, OSError, RuntimeError) as error:
            # uvloop raises RuntimeError for a write to a socket that has gone.
            if self._rests_until_s is None:
                reason = type(error).__name__
                _log.warning("requests are not counted, the store does not answer", extra={"reason": reason})
            self._rests_until_s = self._clock() + REST_S
            return None
        if self._rests_until_s is not None:
            _log.info("requests are counted again")
            self._rests_until_s = None
        return answer

    async def close(self) -> None:
        """Closes the connections."""
        await self._window.close()


class _StoreWindow:
    """Times of the requests that passed, in a store and by its clock."""

    def __init__(self, redis_url: str, timeout_s: float) -> None:
        self._client: Redis = Redis.from_url(
            redis_url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
        )
        self._count = self._client.register_script(_COUNT_SCRIPT)

    async def wait_s(self, name: str, limit: int) -> float:
        """Counts a request if fewer than `limit` passed in the last minute; otherwise returns how long it must wait."""
        try:
            return int(await self._count(keys=[KEY_PREFIX + name], args=[limit, round(WINDOW_S * 1000)])) / 1000
        except ReadOnlyError:
            # The name may lead to another server by now; a connection that is open does not.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            raise

    async def give_back(self, name: str) -> None:
        """Forgets the newest time; which one of a minute makes little difference."""
        await self._client.ltrim(KEY_PREFIX + name, 1, -1)

    async def close(self) -> None:
        await self._client.aclose()


class _MemoryWindow:
    """The same in this process, for tests and for single gateways."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._passed_s: dict[str, deque[float]] = {}

    async def wait_s(self, name: str, limit: int) -> float:
        now_s = self._clock()
        passed_s = self._passed_s.setdefault(name, deque())
        while passed_s and passed_s[0] <= now_s - WINDOW_S:
            passed_s.popleft()
        if len(passed_s) >= limit:
            return passed_s[len(passed_s) - limit] + WINDOW_S - now_s
        passed_s.append(now_s)
        return 0.0

    async def give_back(self, name: str) -> None:
        if self._passed_s.get(name):
            self._passed_s[name].pop()

    async def close(self) -> None:
        """Has no connections."""
