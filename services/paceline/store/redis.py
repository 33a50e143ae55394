"""The store on a Redis 7.0 or Valkey server.

A replica is one JSON string with a time to live and an entry in an index set; a session is one hash, and its token
log one string of four bytes a token. Whole keys expire, no fields. What must be atomic is a Lua script. A key's name
begins with `paceline:`; both keys of a session hash to one slot.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import numpy as np
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from paceline.config import public_url
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import ModelIdentity
from paceline.store.base import (
    AdvanceSession,
    LoggedSession,
    PutSession,
    Replica,
    SessionRecord,
    SessionState,
    SessionWrite,
    Written,
    next_owner_epoch,
)

ResultT = TypeVar("ResultT")

SOCKET_TIMEOUT_S = 1.0
# One try over a connection that went stale, one over a new one, and the time to connect.
CALL_TIMEOUT_S = 3.0
REPLICA_PREFIX = "paceline:replica:"
REPLICA_INDEX = "paceline:replicas"
DRAINING_SET = "paceline:draining"
CLAIM_TRIES = 8

# The draining mark lives beside the entries: whoever sets it need not know what the replica says of itself.
_REPLICAS_SCRIPT = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.call('GET', ARGV[1] .. id)
  if value then
    found[#found + 1] = value
    found[#found + 1] = redis.call('SISMEMBER', KEYS[2], id)
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
if owner and newer(owner, ARGV[1]) then return 1 end
redis.call('DEL', KEYS[1])
for index = 4, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[index], ARGV[index + 1]) end
redis.call('HSET', KEYS[1], 'ttl_ms', ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 0
"""
)
# Growing strings are given room to spare by the server; a log that will not grow any more is written back exact.
_ADVANCE_SCRIPT = (
    _NEWER_FUNCTION
    + """
if not owner then return 2 end
if newer(owner, ARGV[1]) then return 1 end
if redis.call('STRLEN', KEYS[2]) < tonumber(ARGV[2]) then return 2 end
local length = redis.call('STRLEN', KEYS[2])
if #ARGV[3] > 0 then length = redis.call('SETRANGE', KEYS[2], ARGV[2], ARGV[3]) end
if ARGV[4] ~= 'running' then redis.call('SET', KEYS[2], redis.call('GET', KEYS[2])) end
local committed = length / 4 - tonumber(redis.call('HGET', KEYS[1], 'prompt_len'))
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'committed_len', string.format('%d', committed), 'state', ARGV[4])
local ttl = redis.call('HGET', KEYS[1], 'ttl_ms')
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('PEXPIRE', KEYS[2], ttl)
return 0
"""
)
_CLAIM_SCRIPT = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'owner', ARGV[3])
return 1
"""
_TOKEN_TYPE = np.dtype("<u4")
_WRITTEN = (Written.DONE, Written.TAKEN_OVER, Written.MISSING)
_INTEGER_FIELDS = frozenset({"epoch", "seed", "prompt_len", "committed_len"})
_REPLICA_FIELDS = frozenset(field.name for field in fields(Replica))
_IDENTITY_FIELDS = frozenset(field.name for field in fields(ModelIdentity))
_SESSION_FIELDS = tuple(field.name for field in fields(SessionRecord))

_log = logging.getLogger(__name__)


class RedisStore:
    """A store on a real server; connections are made when first needed, and again after a loss."""

    def __init__(self, url: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self._place = _place(url)
        try:
            self._client: Redis = Redis.from_url(
                url,
                socket_timeout=socket_timeout_s,
                socket_connect_timeout=socket_timeout_s,
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError:
            raise ConfigError(f"the store's URL {public_url(url)!r} is not a valid one") from None
        self._replicas = self._client.register_script(_REPLICAS_SCRIPT)
        self._put = self._client.register_script(_PUT_SCRIPT)
        self._advance = self._client.register_script(_ADVANCE_SCRIPT)
        self._claim = self._client.register_script(_CLAIM_SCRIPT)

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
                pipe.srem(DRAINING_SET, replica_id)
                await pipe.execute()

        await self._call(delete)

    async def drain(self, replica_id: str, *, draining: bool = True) -> None:
        """Marks a replica as draining, or takes the mark back."""
        change = self._client.sadd if draining else self._client.srem
        await self._call(lambda: change(DRAINING_SET, replica_id))

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the replicas alive; entries that cannot be read are logged and left out."""
        keys = [REPLICA_INDEX, DRAINING_SET]
        values = await self._call(lambda: self._replicas(keys=keys, args=[REPLICA_PREFIX]))
        entries = zip(values[::2], values[1::2], strict=True)
        found = (_replica_from_json(value, draining=bool(mark)) for value, mark in entries)
        alive = [replica for replica in found if replica is not None and role in (None, replica.role)]
        return sorted(alive, key=lambda replica: replica.replica_id)

    async def write_sessions(self, writes: Sequence[SessionWrite]) -> list[Written]:
        """Makes writes in order, each in one atomic step, all in one exchange."""
        if not writes:
            return []

        async def write_all() -> list[int]:
            async with self._client.pipeline(transaction=False) as pipe:
                for write in writes:
                    if isinstance(write, PutSession):
                        await self._put(_session_keys(write.record.session_id), _put_arguments(write), client=pipe)
                    else:
                        await self._advance(_session_keys(write.session_id), _advance_arguments(write), client=pipe)
                results: list[int] = await pipe.execute()
                return results

        return [_WRITTEN[int(result)] for result in await self._call(write_all)]

    async def session(self, session_id: str) -> LoggedSession | None:
        """Returns a record and its log."""
        record_key, log_key = _session_keys(session_id)

        async def read() -> list[Any]:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hmget(record_key, _SESSION_FIELDS)
                pipe.get(log_key)
                results: list[Any] = await pipe.execute()
                return results

        values, log = await self._call(read)
        if values[0] is None or log is None:
            return None
        pairs = zip(_SESSION_FIELDS, (value.decode() for value in values), strict=True)
        decoded: dict[str, Any] = {name: int(value) if name in _INTEGER_FIELDS else value for name, value in pairs}
        record = SessionRecord(**{**decoded, "state": SessionState(decoded["state"])})
        return LoggedSession(record=record, token_ids=tuple(np.frombuffer(log, _TOKEN_TYPE).tolist()))

    async def claim_session(self, session_id: str, owner: str) -> LoggedSession | None:
        """Makes `owner` the owner of a session that is not finished.

        Raises:
            UnavailableError: The server does not answer, or others write the record all the time.
        """
        for _ in range(CLAIM_TRIES):
            logged = await self.session(session_id)
            if logged is None or logged.record.state.finished:
                return logged
            epoch = next_owner_epoch(logged.record.epoch)
            arguments: list[str | int] = [logged.record.epoch, epoch, owner]
            keys = _session_keys(session_id)[:1]
            if await self._call(partial(self._claim, keys=keys, args=arguments)):
                return replace(logged, record=replace(logged.record, epoch=epoch, owner=owner))
        raise UnavailableError(f"session {session_id!r} changes its owner all the time; try again")

    async def delete_session(self, session_id: str) -> None:
        """Forgets a session."""
        await self._call(lambda: self._client.delete(*_session_keys(session_id)))

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


def _session_keys(session_id: str) -> list[str]:
    """Keys of the record and of the log; what stands in braces decides the slot of a cluster."""
    return [f"paceline:session:{{{session_id}}}", f"paceline:tokens:{{{session_id}}}"]


def _put_arguments(write: PutSession) -> list[str | int | bytes]:
    arguments: list[str | int | bytes] = [write.record.epoch, _milliseconds(write.ttl_s), _log_bytes(write.token_ids)]
    for name in _SESSION_FIELDS:
        arguments += [name, getattr(write.record, name)]
    return arguments


def _advance_arguments(write: AdvanceSession) -> list[str | int | bytes]:
    return [write.epoch, write.base_len * _TOKEN_TYPE.itemsize, _log_bytes(write.token_ids), str(write.state)]


def _log_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, _TOKEN_TYPE).tobytes()


def _replica_from_json(text: bytes, *, draining: bool) -> Replica | None:
    try:
        values = json.loads(text)
        identity = values.pop("identity")
        if identity is not None:
            identity["eos_token_ids"] = tuple(identity["eos_token_ids"])
            identity = ModelIdentity(**_known(identity, _IDENTITY_FIELDS))
        replica = Replica(identity=identity, **_known(values, _REPLICA_FIELDS))
        return replace(replica, draining=draining or replica.draining)
    except (ValueError, TypeError, KeyError, AttributeError):
        _log.warning("registry entry cannot be read", extra={"entry": repr(text[:200])})
        return None


def _known(values: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Returns the fields that are known here; newer replicas may say more."""
    return {name: value for name, value in values.items() if name in names}
