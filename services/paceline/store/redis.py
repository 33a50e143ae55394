"""The store on a Redis 7.0 or Valkey server.

A replica is one JSON string with a time to live and an entry in an index set; a session is one hash. Whole
keys expire, no fields. What must be atomic is a Lua script. A key's name begins with `paceline:`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paceline.config import public_url
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import ModelIdentity
from paceline.store.base import Replica, SessionRecord

ResultT = TypeVar("ResultT")

SOCKET_TIMEOUT_S = 1.0
# One try over a connection that went stale, one over a new one, and the time to connect.
CALL_TIMEOUT_S = 3.0
REPLICA_PREFIX = "paceline:replica:"
REPLICA_INDEX = "paceline:replicas"
SESSION_PREFIX = "paceline:session:"

_REPLICAS_SCRIPT = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.call('GET', ARGV[1] .. id)
  if value then
    found[#found + 1] = value
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return found
"""
# Epochs have up to 64 bits and Lua's numbers 53, so their decimal digits are compared.
_NEWER_FUNCTION = """
local function newer(a, b)
  if #a ~= #b then return #a > #b end
  return a > b
end
local owner = redis.call('HGET', KEYS[1], 'epoch')
"""
_PUT_SCRIPT = (
    _NEWER_FUNCTION
    + """
if owner and newer(owner, ARGV[1]) then return 0 end
redis.call('DEL', KEYS[1])
for index = 3, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[index], ARGV[index + 1]) end
redis.call('HSET', KEYS[1], 'ttl_ms', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
)
_ADVANCE_SCRIPT = (
    _NEWER_FUNCTION
    + """
if not owner or newer(owner, ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'committed_len', ARGV[2], 'state', ARGV[3])
redis.call('PEXPIRE', KEYS[1], redis.call('HGET', KEYS[1], 'ttl_ms'))
return 1
"""
)
_INTEGER_FIELDS = frozenset({"epoch", "seed", "prompt_len", "committed_len"})
_SESSION_FIELDS = tuple(field.name for field in fields(SessionRecord))

_log = logging.getLogger(__name__)


class RedisStore:
    """A store on a real server; connections are made when first needed, and again after a loss."""

    def __init__(self, url: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self._place = _place(url)
        try:
            self._client: Redis = Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=socket_timeout_s,
                socket_connect_timeout=socket_timeout_s,
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError:
            raise ConfigError(f"the store's URL {public_url(url)!r} is not a valid one") from None
        self._replicas = self._client.register_script(_REPLICAS_SCRIPT)
        self._put = self._client.register_script(_PUT_SCRIPT)
        self._advance = self._client.register_script(_ADVANCE_SCRIPT)

    async def announce(self, replica: Replica, ttl_s: float) -> None:
        """Puts a replica into the registry, or renews it."""
        value = json.dumps(asdict(replica))

        async def write() -> None:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.set(REPLICA_PREFIX + replica.replica_id, value, px=_milliseconds(ttl_s))
                pipe.sadd(REPLICA_INDEX, replica.replica_id)
                await pipe.execute()

        await self._call(write)

    async def withdraw(self, replica_id: str) -> None:
        """Takes a replica out of the registry."""

        async def delete() -> None:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.delete(REPLICA_PREFIX + replica_id)
                pipe.srem(REPLICA_INDEX, replica_id)
                await pipe.execute()

        await self._call(delete)

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the replicas alive; entries that cannot be read are logged and left out."""
        values = await self._call(lambda: self._replicas(keys=[REPLICA_INDEX], args=[REPLICA_PREFIX]))
        found = (_replica_from_json(value) for value in values)
        alive = [replica for replica in found if replica is not None and role in (None, replica.role)]
        return sorted(alive, key=lambda replica: replica.replica_id)

    async def put_session(self, record: SessionRecord, ttl_s: float) -> bool:
        """Writes a whole record unless a newer epoch owns it."""
        arguments: list[str | int] = [record.epoch, _milliseconds(ttl_s)]
        for name in _SESSION_FIELDS:
            arguments += [name, getattr(record, name)]
        key = SESSION_PREFIX + record.session_id
        return bool(await self._call(lambda: self._put(keys=[key], args=arguments)))

    async def session(self, session_id: str) -> SessionRecord | None:
        """Returns a record."""
        values = await self._call(lambda: self._client.hmget(SESSION_PREFIX + session_id, _SESSION_FIELDS))
        if values[0] is None:
            return None
        pairs = zip(_SESSION_FIELDS, values, strict=True)
        decoded: dict[str, Any] = {name: int(value) if name in _INTEGER_FIELDS else value for name, value in pairs}
        return SessionRecord(**decoded)

    async def advance_session(self, session_id: str, epoch: int, committed_len: int, state: str) -> bool:
        """Writes progress unless a newer epoch owns the session or it is gone."""
        arguments: list[str | int] = [epoch, committed_len, state]
        key = SESSION_PREFIX + session_id
        return bool(await self._call(lambda: self._advance(keys=[key], args=arguments)))

    async def delete_session(self, session_id: str) -> None:
        """Forgets a session."""
        await self._call(lambda: self._client.delete(SESSION_PREFIX + session_id))

    async def ping(self) -> None:
        """Returns when the server answers."""
        await self._call(self._client.ping)

    async def close(self) -> None:
        """Closes the connections."""
        with suppress(RedisError, OSError):
            await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, command: Callable[[], Awaitable[Any]]) -> Any:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await command()
        except AuthenticationError as error:
            raise UnavailableError(f"the store at {self._place} refuses our user or password") from error
        except (TimeoutError, RedisTimeoutError) as error:
            raise UnavailableError(f"the store at {self._place} does not answer in time") from error
        except (RedisError, OSError, RuntimeError) as error:
            # uvloop raises RuntimeError for a write to a socket that has gone.
            reason = type(error).__name__
            raise UnavailableError(f"the store at {self._place} cannot be used ({reason})") from error


def _place(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    try:
        return f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
    except ValueError:
        raise ConfigError(f"the port of the store's URL {public_url(url)!r} is not from 1 to 65535") from None


def _milliseconds(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))


def _replica_from_json(text: str) -> Replica | None:
    try:
        values = json.loads(text)
        identity = values.pop("identity")
        if identity is not None:
            identity["eos_token_ids"] = tuple(identity["eos_token_ids"])
            identity = ModelIdentity(**identity)
        return Replica(identity=identity, **values)
    except (ValueError, TypeError, KeyError, AttributeError):
        _log.warning("registry entry cannot be read", extra={"entry": text[:200]})
        return None
