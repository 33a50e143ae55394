"""The store on a Redis 7.0 or Valkey server.

A replica is one JSON string with a time to live and an entry in an index set; a session is one hash, and its token
log one string of four bytes a token. Whole keys expire, no fields. Atomic operations are Lua scripts. A key's name
begins with `paceline:`; both keys of a session hash to one slot.

A kept document is a hash that expires. An index knows the sizes of all documents, in the order in which they expire, by
keeper and together; it changes in the same script as the documents, and does not expire. Its keys hash to one slot.

A server at its `maxmemory` refuses writes that may grow. Registry and claims are small and bounded, so their scripts
are permitted on a full server (`allow-oom`); records of sessions are refused then. A full server stops a script at its
first write only, so a script for records must begin with one that grows.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterCrossSlotError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from paceline.core.addresses import host_port
from paceline.core.errors import MAX_PROBLEM_CHARS, ConfigError, UnavailableError, shortened
from paceline.service.config import named, public_url
from paceline.store.base import (
    EPOCHS_PER_OWNER,
    AdvanceSession,
    Document,
    Keeping,
    LoggedSession,
    PutSession,
    Replica,
    SessionRecord,
    SessionWrite,
    Store,
    Written,
    first_owner_epoch,
)
from paceline.store.reading import EntryError, number_from_text, record_from_fields, replica_from_json

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
  redis.call('DEL', key('body', id))
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
local keeper, name, body, rank, size, ttl_ms, room, replaces = unpack(ARGV)
local id = keeper .. ':' .. name
local stored = redis.call('HGET', key('body', id), 'rank')
if stored and (tonumber(stored) or -1) >= tonumber(rank) then return 1 end
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

_Arguments = list[str | int | bytes]

URL_FILES = frozenset({"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"})
URL_OPTIONS = URL_FILES | {
    "client_name", "db", "health_check_interval", "max_connections", "password", "protocol", "socket_connect_timeout",
    "socket_keepalive", "socket_timeout", "ssl_ca_path", "ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers",
    "ssl_min_version", "ssl_password", "username",
}  # fmt: skip
SOCKET_TIMEOUT_S = 1.0
# A try over a stale connection, another over a new one, and the time to connect.
CALL_TIMEOUT_S = 3.0
REPLICA_PREFIX = "paceline:replica:"
REPLICA_INDEX = "paceline:replicas"
DRAIN_MARKS = "paceline:drain_marks"
NOTE_PREFIX = "paceline:note:"

# The draining mark is stored beside the entries, so that it can be set without knowing the entry. 0 means that it was
# taken back; no mark at all may mean that the store has lost it.
_ANNOUNCE_SCRIPT = """#!lua flags=allow-oom
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('SADD', KEYS[2], ARGV[1])
if ARGV[4] == '1' then redis.call('HSETNX', KEYS[3], ARGV[1], '1') end
return redis.call('HGET', KEYS[3], ARGV[1]) == '1'
"""
_DRAIN_SCRIPT = """#!lua flags=allow-oom
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""
_REPLICAS_SCRIPT = """
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.pcall('GET', ARGV[1] .. id)
  if not value then
    redis.pcall('SREM', KEYS[1], id)
  else
    found[#found + 1] = id
    found[#found + 1] = type(value) == 'string' and value or ''
    found[#found + 1] = redis.call('HGET', KEYS[2], id) == '1'
  end
end
return found
"""
_YIELDS_FUNCTION = """
local stored = redis.call('HMGET', KEYS[1], 'epoch', 'owner')
local function taken_over(epoch, first_epoch, owner)
  local known = tonumber(stored[1] or '')
  if not known or tonumber(first_epoch) > known then return false end
  return known > tonumber(epoch) or stored[2] ~= owner
end
"""
_PUT_SCRIPT = (
    _YIELDS_FUNCTION
    + """
if taken_over(ARGV[1], ARGV[2], ARGV[3]) then return 1 end
redis.call('HSET', KEYS[1], 'ttl_ms', ARGV[4], unpack(ARGV, 6))
redis.call('SET', KEYS[2], ARGV[5])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 0
"""
)
# The server gives growing strings spare room; a log that will not grow any more is rewritten without it.
_ADVANCE_SCRIPT = (
    _YIELDS_FUNCTION
    + """
if not stored[1] then return 2 end
if taken_over(ARGV[1], ARGV[2], ARGV[3]) then return 1 end
if redis.call('STRLEN', KEYS[2]) < tonumber(ARGV[4]) then return 2 end
local prompt_len, ttl_ms = unpack(redis.call('HMGET', KEYS[1], 'prompt_len', 'ttl_ms'))
local length = redis.call('STRLEN', KEYS[2])
if #ARGV[5] > 0 then length = redis.call('SETRANGE', KEYS[2], ARGV[4], ARGV[5]) end
local committed = string.format('%d', length / 4 - tonumber(prompt_len))
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'owner', ARGV[3], 'committed_len', committed, 'state', ARGV[6])
if ARGV[6] ~= 'running' then redis.call('SET', KEYS[2], redis.call('GET', KEYS[2])) end
redis.call('PEXPIRE', KEYS[1], ttl_ms)
redis.call('PEXPIRE', KEYS[2], ttl_ms)
return 0
"""
)
# Returns the record and its log as they were when the owner changed.
_CLAIM_SCRIPT = """#!lua flags=allow-oom
local stored = redis.call('HGET', KEYS[1], 'epoch')
if not stored then return false end
local next_range = (math.floor(stored / ARGV[1]) + 1) * ARGV[1]
redis.call('HSET', KEYS[1], 'epoch', string.format('%.0f', next_range), 'owner', ARGV[2])
return {redis.call('HMGET', KEYS[1], unpack(ARGV, 3)), redis.call('GET', KEYS[2])}
"""
_TOKEN_TYPE = np.dtype("<u4")
_WRITTEN = (Written.DONE, Written.TAKEN_OVER, Written.MISSING)
_SESSION_FIELDS = tuple(field.name for field in fields(SessionRecord))

_log = logging.getLogger(__name__)


class RedisStore(Store):
    """A store on a real server; connections are made when first needed, and again after a loss."""

    def __init__(self, url: str, *, socket_timeout_s: float = SOCKET_TIMEOUT_S) -> None:
        self._place = _place(url)
        _check_options(url)
        self._client: Redis = Redis.from_url(
            url,
            socket_timeout=socket_timeout_s,
            socket_connect_timeout=socket_timeout_s,
            retry=Retry(NoBackoff(), 1),
        )
        # Impossible options show when a connection is made, before it is dialled.
        self._client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        # Why entries were left out, by their names.
        self._bad_entries: dict[str, str] = {}
        self._announce = self._client.register_script(_ANNOUNCE_SCRIPT)
        self._drain = self._client.register_script(_DRAIN_SCRIPT)
        self._replicas = self._client.register_script(_REPLICAS_SCRIPT)
        self._put = self._client.register_script(_PUT_SCRIPT)
        self._advance = self._client.register_script(_ADVANCE_SCRIPT)
        self._claim = self._client.register_script(_CLAIM_SCRIPT)
        self._keep = self._client.register_script(_KEEP_SCRIPT)
        self._forget = self._client.register_script(_FORGET_SCRIPT)

    @property
    def num_bad_entries(self) -> int:
        return len(self._bad_entries)

    async def announce(self, replica: Replica, ttl_s: float, *, marked: bool = False) -> bool:
        keys = [REPLICA_PREFIX + replica.replica_id, REPLICA_INDEX, DRAIN_MARKS]
        value = json.dumps(asdict(replica))
        arguments: _Arguments = [replica.replica_id, value, _milliseconds(ttl_s), int(marked)]
        return bool(await self._call(partial(self._announce, keys=keys, args=arguments)))

    async def withdraw(self, replica_id: str) -> None:

        async def delete() -> None:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.delete(REPLICA_PREFIX + replica_id)
                pipe.srem(REPLICA_INDEX, replica_id)
                pipe.hdel(DRAIN_MARKS, replica_id)
                await pipe.execute()

        await self._call(delete, "DEL")

    async def drain(self, replica_id: str, *, draining: bool = True) -> None:
        await self._call(partial(self._drain, keys=[DRAIN_MARKS], args=[replica_id, int(draining)]))

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the replicas alive; entries that cannot be read are logged once and left out."""
        keys = [REPLICA_INDEX, DRAIN_MARKS]
        answer = await self._call(partial(self._replicas, keys=keys, args=[REPLICA_PREFIX]))
        alive: list[Replica] = []
        bad: dict[str, str] = {}
        for name, text, mark in zip(answer[::3], answer[1::3], answer[2::3], strict=True):
            replica_id = name.decode(errors="replace")
            try:
                alive.append(replica_from_json(replica_id, text, marked=bool(mark)))
            except EntryError as error:
                bad[replica_id] = str(error)
                if self._bad_entries.get(replica_id) != str(error):
                    _log.warning("a registry entry is left out", extra={"replica_id": replica_id, "error": error})
        self._bad_entries = bad
        return sorted((each for each in alive if role in (None, each.role)), key=lambda each: each.replica_id)

    async def write_sessions(self, writes: Sequence[SessionWrite]) -> list[Written]:
        if not writes:
            return []

        async def write_all() -> list[int | ResponseError]:
            async with self._client.pipeline(transaction=False) as pipe:
                for write in writes:
                    if isinstance(write, PutSession):
                        await self._put(_session_keys(write.record.session_id), _put_arguments(write), client=pipe)
                    else:
                        await self._advance(_session_keys(write.session_id), _advance_arguments(write), client=pipe)
                results: list[int | ResponseError] = await pipe.execute(raise_on_error=False)
            return _unless_all_failed(results)

        return [_written(result) for result in await self._call(write_all)]

    async def session(self, session_id: str) -> LoggedSession | None:
        keys = _session_keys(session_id)

        async def read() -> list[Any]:
            async with self._client.pipeline(transaction=True) as pipe:
                pipe.hmget(keys[0], _SESSION_FIELDS)
                pipe.get(keys[1])
                pipe.hget(keys[0], "ttl_ms")
                pipe.pttl(keys[0])
                results: list[Any] = await pipe.execute(raise_on_error=False)
                return results

        return _logged(session_id, await self._call(read, "HMGET"))

    async def claim_session(self, session_id: str, owner: str) -> LoggedSession | None:
        """Makes `owner` the owner of a session whose record can be read."""
        if await self.session(session_id) is None:
            return None
        arguments: _Arguments = [EPOCHS_PER_OWNER, owner, *_SESSION_FIELDS]
        claimed = await self._call(partial(self._claim, keys=_session_keys(session_id), args=arguments))
        return None if claimed is None else _logged(session_id, claimed)

    async def keep(self, document: Document, *, ttl_s: float, room_bytes: int, replaces: bool = False) -> Keeping:
        arguments: _Arguments = [
            *(document.keeper, document.name, document.body, document.rank, document.size),
            *(_milliseconds(ttl_s), room_bytes, int(replaces)),
        ]
        return _OUTCOMES[await self._call(partial(self._keep, keys=[PREFIX], args=arguments))]

    async def kept(self, keeper: str, name: str) -> Document | None:
        key = f"{PREFIX}body:{keeper}:{name}"
        rank, body = await self._call(lambda: self._client.hmget(key, ["rank", "body"]), "HMGET")
        if rank is None or body is None:
            return None
        try:
            known = number_from_text("rank", rank)
        except EntryError as error:
            _log.warning("a document cannot be read", extra={"document": f"{keeper}:{name}", "error": error})
            return None
        return Document(keeper=keeper, name=name, body=bytes(body), rank=known)

    async def forget(self, keeper: str, name: str) -> bool:
        return bool(await self._call(partial(self._forget, keys=[PREFIX], args=[f"{keeper}:{name}"])))

    async def note(self, name: str) -> bytes | None:
        content: bytes | None = await self._call(partial(self._client.get, NOTE_PREFIX + name), "GET")
        return content

    async def write_note(self, name: str, content: bytes, *, ttl_s: float, new: bool = False) -> bool:
        write = partial(self._client.set, NOTE_PREFIX + name, content, px=_milliseconds(ttl_s), nx=new)
        return bool(await self._call(write, "SET"))

    async def ping(self) -> None:
        """Returns when the server answers."""
        await self._call(self._client.ping, "PING")

    async def close(self) -> None:
        with suppress(RedisError, OSError):
            await self._client.aclose()

    async def _call(self, call: Callable[[], Awaitable[Any]], command: str = "EVALSHA") -> Any:
        """Makes a call; `command` names it in errors. Scripts are called by EVALSHA."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                return await call()
        except AuthenticationError as error:
            raise UnavailableError(f"the store at {self._place} refuses our user or password") from error
        except (TimeoutError, RedisTimeoutError) as error:
            raise UnavailableError(f"the store at {self._place} does not answer in time") from error
        except OutOfMemoryError as error:
            raise UnavailableError(
                f"the store at {self._place} is full; raise its maxmemory, or shorten the gateways' --record-ttl-s"
            ) from error
        except ReadOnlyError as error:
            # The name may resolve to another server by now, but open connections stay with the old one.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            raise UnavailableError(
                f"the store at {self._place} is a read-only copy of another; let --redis-url name the primary"
            ) from error
        except (ClusterCrossSlotError, ClusterDownError, AskError) as error:
            raise UnavailableError(
                f"the store at {self._place} runs in cluster mode, which is not served; let --redis-url name a server "
                "with cluster-enabled no"
            ) from error
        except ResponseError as error:
            sentence = shortened(" ".join(str(error).split()), MAX_PROBLEM_CHARS)
            raise UnavailableError(f"the store at {self._place} refuses {command}: {sentence}") from error
        except (RedisError, OSError, RuntimeError) as error:
            # uvloop raises RuntimeError for a write to a closed socket.
            reason = type(error).__name__
            raise UnavailableError(f"the store at {self._place} cannot be used ({reason})") from error


def open_store(url: str, setting: str = "--redis-url") -> Store:
    """Opens the store at a URL: `redis://[user:password@]host:port/db`, also `rediss` and `unix`, or `memory://`.

    Nothing is dialled yet. `memory://` stands for no store at all.

    Args:
        url: The URL; an option of redis-py may follow a question mark.
        setting: The setting that gave it, for errors.

    Raises:
        ConfigError: The URL has another scheme, or an option that is not known or has a bad value.
    """
    with named(setting, public_url(url)):
        scheme = urlsplit(url).scheme
        if scheme == "memory":
            return Store()
        if scheme in ("redis", "rediss", "unix"):
            return RedisStore(url)
        raise ConfigError("must begin with redis://, rediss://, unix:// or memory://")


def require_server(url: str, setting: str = "--redis-url") -> None:
    """Refuses `memory://` where services have to find one another.

    Raises:
        ConfigError: The URL names no server, or cannot be used.
    """
    if not isinstance(open_store(url, setting), RedisStore):
        raise ConfigError(f"{setting} must name a server, got memory://, which stands for none")


def _place(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return host_port(parts.hostname or "localhost", parts.port or 6379)


def _check_options(url: str) -> None:
    """Refuses options that redis-py would hand to its classes as text, and those that change what it answers."""
    scheme = urlsplit(url).scheme
    for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name.startswith("ssl_") and scheme != "rediss":
            raise ConfigError(f"the option {name!r} is one of TLS, whose URLs begin with rediss://, got {scheme}://")
        if name == "socket_keepalive" and scheme == "unix":
            raise ConfigError(f"the option {name!r} is none of a socket's file, got {scheme}://")
        if name not in URL_OPTIONS:
            raise ConfigError(f"the option {name!r} is not one of {', '.join(sorted(URL_OPTIONS))}")
        if name in URL_FILES and not Path(value).is_file():
            raise ConfigError(f"the option {name!r} must name a file, got {value!r}")


def _milliseconds(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))


def _session_keys(session_id: str) -> list[str]:
    """Keys of the record and of the log; the part in braces decides the slot in a cluster."""
    return [f"paceline:session:{{{session_id}}}", f"paceline:tokens:{{{session_id}}}"]


def _put_arguments(write: PutSession) -> _Arguments:
    record = write.record
    arguments = [*_ownership(record.epoch, record.owner), _milliseconds(write.ttl_s), _log_bytes(write.token_ids)]
    for name in _SESSION_FIELDS:
        arguments += [name, getattr(record, name)]
    return arguments


def _advance_arguments(write: AdvanceSession) -> _Arguments:
    base = write.base_len * _TOKEN_TYPE.itemsize
    return [*_ownership(write.epoch, write.owner), base, _log_bytes(write.token_ids), str(write.state)]


def _ownership(epoch: int, owner: str) -> _Arguments:
    """Arguments of `taken_over`."""
    return [epoch, first_owner_epoch(epoch), owner]


def _log_bytes(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, _TOKEN_TYPE).tobytes()


def _unless_all_failed(results: list[int | ResponseError]) -> list[int | ResponseError]:
    """Returns the answers to some writes; if all failed, raises the first error, which concerns the server."""
    errors = [result for result in results if isinstance(result, ResponseError)]
    if len(errors) == len(results):
        raise errors[0]
    return results


def _written(result: int | ResponseError) -> Written:
    if isinstance(result, ResponseError):
        _log.warning("the store refuses the record of a session", extra={"error": result})
        return Written.REFUSED
    return _WRITTEN[result]


def _logged(session_id: str, answer: Sequence[Any]) -> LoggedSession | None:
    """Returns a session from its fields, its log, its time to live and what is left of it; the last two may be missing.

    None: it does not exist or cannot be read.
    """
    values, log, ttl_ms, left_ms = (*answer, b"0", 0)[:4]
    errors = [each for each in answer if isinstance(each, ResponseError)]
    if not errors and (values[0] is None or log is None):
        return None
    try:
        if errors:
            raise EntryError(str(errors[0]))
        named = dict(zip(_SESSION_FIELDS, values, strict=True))
        record = record_from_fields(session_id, named, len(log))
        age_s = (number_from_text("ttl_ms", ttl_ms or b"") - left_ms) / 1000
    except EntryError as error:
        _log.warning("a session record cannot be read", extra={"session_id": session_id, "error": error})
        return None
    return LoggedSession(record=record, token_ids=tuple(np.frombuffer(log, _TOKEN_TYPE).tolist()), age_s=age_s)
