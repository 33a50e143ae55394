"""Opens the store that a URL names, and the one that stands for none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self
from urllib.parse import urlsplit

from paceline.core.errors import ConfigError, UnavailableError
from paceline.service.config import named, public_url
from paceline.store.base import Document, Keeping, LoggedSession, Replica, SessionWrite, Store, Written
from paceline.store.redis import RedisStore

_NOWHERE = "--redis-url memory:// keeps nothing; name a Redis or Valkey server"


class NoStore:
    """Registry, sessions and documents in one: it knows nothing, forgets announcements, and refuses what must last."""

    num_bad_entries = 0

    @property
    def documents(self) -> Self:
        return self

    async def announce(self, replica: Replica, ttl_s: float, *, marked: bool = False) -> bool:
        return False

    async def withdraw(self, replica_id: str) -> None:
        """There is nothing to take out."""

    async def drain(self, replica_id: str, *, draining: bool = True) -> None:
        """Raises: the replica would not learn of it."""
        raise UnavailableError(_NOWHERE)

    async def replicas(self, role: str | None = None) -> list[Replica]:
        return []

    async def write_sessions(self, writes: Sequence[SessionWrite]) -> list[Written]:
        raise UnavailableError(_NOWHERE)

    async def session(self, session_id: str) -> LoggedSession | None:
        return None

    async def claim_session(self, session_id: str, owner: str) -> LoggedSession | None:
        return None

    async def keep(
        self, document: Document, *, ttl_s: float, work_s: float, room_bytes: int, replaces: bool = False
    ) -> Keeping:
        raise UnavailableError(_NOWHERE)

    async def work_on(self, documents: Sequence[tuple[str, str]], work_s: float) -> None:
        """There is none to mark."""

    async def kept(self, keeper: str, name: str) -> Document | None:
        return None

    async def forget(self, keeper: str, name: str) -> bool:
        return False

    async def note(self, name: str) -> bytes | None:
        return None

    async def write_note(self, name: str, content: bytes, *, ttl_s: float, new: bool = False) -> bool:
        return True

    async def ping(self) -> None:
        """Returns."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


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
            return NoStore()
        if scheme in ("redis", "rediss", "unix"):
            return RedisStore(url)
        raise ConfigError("must begin with redis://, rediss://, unix:// or memory://")


def require_server(url: str, setting: str = "--redis-url") -> None:
    """Refuses `memory://` where services have to find one another.

    Raises:
        ConfigError: The URL names no server, or cannot be used.
    """
    if isinstance(open_store(url, setting), NoStore):
        raise ConfigError(f"{setting} must name a server, got memory://, which stands for none")
