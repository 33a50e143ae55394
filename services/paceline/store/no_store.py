"""The store of `memory://`: none. For services that nobody looks up, such as drafters whose addresses verifiers know.

A gateway on it finds no verifier, so it has no session and no response to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from paceline.core.errors import UnavailableError
from paceline.store.base import LoggedSession, Replica, SessionWrite, Written
from paceline.store.documents import Document, Keeping

_NOWHERE = "--redis-url memory:// keeps nothing; name a Redis or Valkey server"


class NoStore:
    """Registry, sessions and documents in one: it knows nothing, forgets announcements, and refuses what must last."""

    num_bad_entries = 0

    @property
    def documents(self) -> Self:
        """Itself."""
        return self

    async def announce(self, replica: Replica, ttl_s: float, *, marked: bool = False) -> bool:
        """Tells nobody; nobody can have marked the replica as draining either."""
        return False

    async def withdraw(self, replica_id: str) -> None:
        """There is nothing to take out."""

    async def drain(self, replica_id: str, *, draining: bool = True) -> None:
        """Raises: the replica would not learn of it."""
        raise UnavailableError(_NOWHERE)

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns none."""
        return []

    async def write_sessions(self, writes: Sequence[SessionWrite]) -> list[Written]:
        """Raises."""
        raise UnavailableError(_NOWHERE)

    async def session(self, session_id: str) -> LoggedSession | None:
        """Knows none."""
        return None

    async def claim_session(self, session_id: str, owner: str) -> LoggedSession | None:
        """Knows none."""
        return None

    async def keep(
        self, document: Document, *, ttl_s: float, work_s: float, room_bytes: int, replaces: bool = False
    ) -> Keeping:
        """Raises."""
        raise UnavailableError(_NOWHERE)

    async def work_on(self, documents: Sequence[tuple[str, str]], work_s: float) -> None:
        """There is none to mark."""

    async def kept(self, keeper: str, name: str) -> Document | None:
        """Knows none."""
        return None

    async def forget(self, keeper: str, name: str) -> bool:
        """Knows none."""
        return False

    async def ping(self) -> None:
        """Returns."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...
