"""The session store and registry of the fleet, as one interface; it is never on the token path.

Replicas announce themselves and are forgotten when they stop doing so. A session record has one owner at a
time: ownership is numbered by `epoch`, and an owner that lost a session learns it from `advance_session`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self
from urllib.parse import urlsplit

from paceline.config import public_url
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import ModelIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One running service as others find it; `address` is `host:port` of its gRPC server."""

    replica_id: str
    role: str
    address: str
    identity: ModelIdentity | None = None
    max_sessions: int = 0
    num_sessions: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRecord:
    """What the fleet remembers of a session; token ids are not in it."""

    session_id: str
    epoch: int
    model: str
    verifier_id: str
    drafter_id: str
    seed: int
    prompt_hash: str
    prompt_len: int
    committed_len: int
    state: str
    params_json: str


class Store(Protocol):
    """Registry and session records; an async context manager that closes itself.

    Every method raises `UnavailableError` when the server does not answer in time, naming where it should be.
    """

    async def announce(self, replica: Replica, ttl_s: float) -> None:
        """Puts a replica into the registry, or renews it, for `ttl_s` seconds."""

    async def withdraw(self, replica_id: str) -> None:
        """Takes a replica out of the registry."""

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the replicas alive, of one role or all, sorted by id."""

    async def put_session(self, record: SessionRecord, ttl_s: float) -> bool:
        """Writes a whole record for `ttl_s` seconds.

        Returns:
            False, without a trace, when a newer epoch owns the session.
        """

    async def session(self, session_id: str) -> SessionRecord | None:
        """Returns a record; None when it is unknown or expired."""

    async def advance_session(self, session_id: str, epoch: int, committed_len: int, state: str) -> bool:
        """Writes progress and renews the record's time to live, in one atomic step.

        Returns:
            False, without a trace, when a newer epoch owns the session or the record is gone.
        """

    async def delete_session(self, session_id: str) -> None:
        """Forgets a session."""

    async def ping(self) -> None:
        """Returns when the server answers."""

    async def close(self) -> None:
        """Gives back connections."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


def open_store(url: str) -> Store:
    """Opens the store at a URL: `redis://[user:password@]host:port/db`, also `rediss` and `unix`, or `memory://`.

    Nothing is dialled yet. `memory://` is one process's own and serves tests.

    Raises:
        ConfigError: The URL is none of these.
    """
    try:
        scheme = urlsplit(url).scheme
    except ValueError as error:
        raise ConfigError(f"the store's URL cannot be read ({error})") from None
    if scheme == "memory":
        from paceline.store.memory import MemoryStore

        return MemoryStore()
    if scheme in ("redis", "rediss", "unix"):
        from paceline.store.redis import RedisStore

        return RedisStore(url)
    raise ConfigError(
        f"the store's URL must begin with redis://, rediss://, unix:// or memory://, got {public_url(url)!r}"
    )


async def require(store: Store) -> None:
    """Returns when the store answers; for the start of a service, later it may come and go.

    Raises:
        ConfigError: It cannot be reached; says what to do.
    """
    try:
        await store.ping()
    except UnavailableError as error:
        raise ConfigError(f"{error}; start Redis or Valkey there or give another --redis-url") from error
