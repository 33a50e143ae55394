"""The store inside one process, for tests and for single services; the contract is that of the real one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from paceline.store.base import Replica, SessionRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredReplica:
    replica: Replica
    expires_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredSession:
    record: SessionRecord
    ttl_s: float
    expires_s: float


class MemoryStore:
    """A store that lives and dies with its process; `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _StoredReplica] = {}
        self._sessions: dict[str, _StoredSession] = {}

    async def announce(self, replica: Replica, ttl_s: float) -> None:
        """Puts a replica into the registry, or renews it."""
        self._replicas[replica.replica_id] = _StoredReplica(replica=replica, expires_s=self._clock() + ttl_s)

    async def withdraw(self, replica_id: str) -> None:
        """Takes a replica out of the registry."""
        self._replicas.pop(replica_id, None)

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the replicas alive."""
        now_s = self._clock()
        self._replicas = {key: entry for key, entry in self._replicas.items() if entry.expires_s > now_s}
        alive = (entry.replica for _, entry in sorted(self._replicas.items()))
        return [replica for replica in alive if role is None or replica.role == role]

    async def put_session(self, record: SessionRecord, ttl_s: float) -> bool:
        """Writes a whole record unless a newer epoch owns it."""
        stored = self._alive(record.session_id)
        if stored is not None and stored.record.epoch > record.epoch:
            return False
        self._write(record, ttl_s)
        return True

    async def session(self, session_id: str) -> SessionRecord | None:
        """Returns a record."""
        stored = self._alive(session_id)
        return None if stored is None else stored.record

    async def advance_session(self, session_id: str, epoch: int, committed_len: int, state: str) -> bool:
        """Writes progress unless a newer epoch owns the session or it is gone."""
        stored = self._alive(session_id)
        if stored is None or stored.record.epoch > epoch:
            return False
        record = replace(stored.record, epoch=epoch, committed_len=committed_len, state=state)
        self._write(record, stored.ttl_s)
        return True

    async def delete_session(self, session_id: str) -> None:
        """Forgets a session."""
        self._sessions.pop(session_id, None)

    async def ping(self) -> None:
        """Always answers."""

    async def close(self) -> None:
        """Has nothing to give back."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _write(self, record: SessionRecord, ttl_s: float) -> None:
        now_s = self._clock()
        for session_id in [key for key, stored in self._sessions.items() if stored.expires_s <= now_s]:
            del self._sessions[session_id]
        self._sessions[record.session_id] = _StoredSession(record=record, ttl_s=ttl_s, expires_s=self._clock() + ttl_s)

    def _alive(self, session_id: str) -> _StoredSession | None:
        stored = self._sessions.get(session_id)
        if stored is not None and stored.expires_s <= self._clock():
            del self._sessions[session_id]
            return None
        return stored
