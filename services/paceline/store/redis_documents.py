"""Documents on a Redis or Valkey server.

A document is a hash that expires, beside it a key that lives while somebody works on it. An index knows the sizes of
all, in the order in which they expire, by keeper and together; it changes in the same script as the documents, and does
not expire. All keys hash to one slot.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis.asyncio import Redis

from paceline.store.documents import Document, Keeping

PREFIX = "paceline:{documents}:"
_OUTCOMES = (Keeping.DONE, Keeping.OUTRANKED, Keeping.MISSING, Keeping.TOO_LARGE)

_INDEX_FUNCTIONS = """
local prefix = KEYS[1]
local function key(...) return prefix .. table.concat({...}, ':') end
local function count(keeper, id, size, expires_ms)
  redis.call('HSET', key('sizes'), id, size)
  redis.call('ZADD', key('ends'), expires_ms, id)
  redis.call('ZADD', key('ends', keeper), expires_ms, id)
  redis.call('ZINCRBY', key('held'), size, keeper)
  redis.call('INCRBY', key('total'), size)
end
local function drop(id)
  local keeper, size = id:match('^[^:]*'), tonumber(redis.call('HGET', key('sizes'), id) or 0)
  redis.call('DEL', key('body', id), key('work', id))
  redis.call('HDEL', key('sizes'), id)
  redis.call('ZREM', key('ends'), id)
  redis.call('ZREM', key('ends', keeper), id)
  redis.call('INCRBY', key('total'), -size)
  if tonumber(redis.call('ZINCRBY', key('held'), -size, keeper)) <= 0 then redis.call('ZREM', key('held'), keeper) end
end
"""
# The first line makes a server that is full refuse all of it, though it deletes before it writes.
_KEEP_SCRIPT = (
    "#!lua\n"
    + _INDEX_FUNCTIONS
    + """
local keeper, name, body, rank, size, ttl_ms, work_ms, room, replaces = unpack(ARGV)
local id = keeper .. ':' .. name
local stored = redis.call('HGET', key('body', id), 'rank')
if stored and tonumber(stored) >= tonumber(rank) then return 1 end
if not stored and replaces == '1' then return 2 end
size, room = tonumber(size), tonumber(room)
if size > room then return 3 end
local clock = redis.call('TIME')
local now_ms = clock[1] * 1000 + math.floor(clock[2] / 1000)
drop(id)
for _, expired in ipairs(redis.call('ZRANGEBYSCORE', key('ends'), '-inf', now_ms, 'LIMIT', 0, 100)) do drop(expired) end
while tonumber(redis.call('GET', key('total'))) + size > room do
  local most = redis.call('ZREVRANGE', key('held'), 0, 0, 'WITHSCORES')
  local mine = tonumber(redis.call('ZSCORE', key('held'), keeper) or 0)
  local loser = most[1]
  if mine > 0 and mine + size >= tonumber(most[2]) then loser = keeper end
  local oldest = loser and redis.call('ZRANGE', key('ends', loser), 0, 0)[1]
  -- Only somebody else can have changed the index so that it does not add up.
  if not oldest then redis.call('DEL', key('total'), key('held')) break end
  drop(oldest)
end
redis.call('HSET', key('body', id), 'rank', rank, 'body', body)
redis.call('PEXPIRE', key('body', id), ttl_ms)
if work_ms ~= '0' then redis.call('SET', key('work', id), '1', 'PX', work_ms) end
count(keeper, id, size, now_ms + ttl_ms)
return 0
"""
)
_FORGET_SCRIPT = (
    "#!lua flags=allow-oom\n"
    + _INDEX_FUNCTIONS
    + """
local known = redis.call('EXISTS', key('body', ARGV[1]))
drop(ARGV[1])
return known
"""
)

# Runs a command; raises `UnavailableError` in the words of the store.
_Call = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


class RedisDocuments:
    """Documents on a server.

    Args:
        client: Connections to it.
        call: Runs a command of the client.
    """

    def __init__(self, client: Redis, call: _Call) -> None:
        self._client = client
        self._call = call
        self._keep = client.register_script(_KEEP_SCRIPT)
        self._forget = client.register_script(_FORGET_SCRIPT)

    async def keep(
        self, document: Document, *, ttl_s: float, work_s: float, room_bytes: int, replaces: bool = False
    ) -> Keeping:
        """Writes a document in place of one of a lower rank."""
        arguments: list[str | int | bytes] = [
            *(document.keeper, document.name, document.body, document.rank, document.size),
            *(_milliseconds(ttl_s), _milliseconds(work_s) if document.at_work else 0),
            *(room_bytes, int(replaces)),
        ]
        return _OUTCOMES[await self._call(lambda: self._keep(keys=[PREFIX], args=arguments))]

    async def work_on(self, documents: Sequence[tuple[str, str]], work_s: float) -> None:
        """Marks documents as worked on."""

        async def mark() -> None:
            async with self._client.pipeline(transaction=False) as pipe:
                for keeper, name in documents:
                    pipe.set(_key("work", keeper, name), "1", px=_milliseconds(work_s))
                await pipe.execute()

        await self._call(mark)

    async def kept(self, keeper: str, name: str) -> Document | None:
        """Returns a document."""

        async def read() -> list[Any]:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hmget(_key("body", keeper, name), "rank", "body")
                pipe.exists(_key("work", keeper, name))
                results: list[Any] = await pipe.execute()
                return results

        (rank, body), at_work = await self._call(read)
        if rank is None or body is None:
            return None
        return Document(keeper=keeper, name=name, body=bytes(body), rank=int(rank), at_work=bool(at_work))

    async def forget(self, keeper: str, name: str) -> bool:
        """Deletes a document."""
        return bool(await self._call(lambda: self._forget(keys=[PREFIX], args=[f"{keeper}:{name}"])))


def _key(kind: str, keeper: str, name: str) -> str:
    return f"{PREFIX}{kind}:{keeper}:{name}"


def _milliseconds(duration_s: float) -> int:
    return max(1, round(duration_s * 1000))
