"""The store inside one process, for tests: it fulfils the contract of the real one, sessions and documents."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.store.base import (
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
    next_owner_epoch,
)


def yields_to(stored: SessionRecord, *, epoch: int, owner: str) -> bool:
    """Whether an owner may overwrite a record under an epoch; each range of epochs has one owner."""
    if stored.epoch >= first_owner_epoch(epoch):
        return stored.epoch <= epoch and stored.owner == owner
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredReplica:
    replica: Replica
    expires_s: float


_Id = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredDocument:
    document: Document
    expires_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredSession:
    record: SessionRecord
    token_ids: tuple[int, ...]
    ttl_s: float
    expires_s: float


class MemoryStore(Store):
    """A store that ends with its process; `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._replicas: dict[str, _StoredReplica] = {}
        # Marks that were set (true) or taken back (false).
        self._marks: dict[str, bool] = {}
        self._sessions: dict[str, _StoredSession] = {}
        self._notes: dict[str, tuple[bytes, float]] = {}
        # The oldest first.
        self._documents: dict[_Id, _StoredDocument] = {}

    async def announce(self, replica: Replica, ttl_s: float, *, marked: bool = False) -> bool:
        """Puts a replica into the registry, or renews it; returns whether it should drain."""
        self._replicas[replica.replica_id] = _StoredReplica(replica=replica, expires_s=self._clock() + ttl_s)
        if marked:
            self._marks.setdefault(replica.replica_id, True)
        return self._marks.get(replica.replica_id, False)

    async def withdraw(self, replica_id: str) -> None:
        """Takes a replica out of the registry."""
        self._replicas.pop(replica_id, None)
        self._marks.pop(replica_id, None)

    async def drain(self, replica_id: str, *, draining: bool = True) -> None:
        """Marks a replica as draining, or takes the mark back."""
        self._marks[replica_id] = draining

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the replicas alive."""
        now_s = self._clock()
        self._replicas = {key: entry for key, entry in self._replicas.items() if entry.expires_s > now_s}
        alive = (entry.replica for _, entry in sorted(self._replicas.items()))
        marked = (replace(each, draining=each.draining or self._marks.get(each.replica_id, False)) for each in alive)
        return [replica for replica in marked if role is None or replica.role == role]

    async def write_sessions(self, writes: Sequence[SessionWrite]) -> list[Written]:
        """Makes writes in order."""
        return [self._put(write) if isinstance(write, PutSession) else self._advance(write) for write in writes]

    async def session(self, session_id: str) -> LoggedSession | None:
        """Returns a record and its log."""
        stored = self._alive(session_id)
        if stored is None:
            return None
        age_s = self._clock() - stored.expires_s + stored.ttl_s
        return LoggedSession(record=stored.record, token_ids=stored.token_ids, age_s=age_s)

    async def claim_session(self, session_id: str, owner: str) -> LoggedSession | None:
        """Makes `owner` the owner of a session."""
        stored = self._alive(session_id)
        if stored is None:
            return None
        record = replace(stored.record, owner=owner, epoch=next_owner_epoch(stored.record.epoch))
        self._write(record, stored.token_ids, stored.ttl_s)
        return LoggedSession(record=record, token_ids=stored.token_ids)

    def _put(self, write: PutSession) -> Written:
        stored = self._alive(write.record.session_id)
        if stored is not None and not yields_to(stored.record, epoch=write.record.epoch, owner=write.record.owner):
            return Written.TAKEN_OVER
        self._write(write.record, tuple(write.token_ids), write.ttl_s)
        return Written.DONE

    def _advance(self, write: AdvanceSession) -> Written:
        stored = self._alive(write.session_id)
        if stored is None:
            return Written.MISSING
        if not yields_to(stored.record, epoch=write.epoch, owner=write.owner):
            return Written.TAKEN_OVER
        if write.base_len > len(stored.token_ids):
            return Written.MISSING
        end = write.base_len + len(write.token_ids)
        token_ids = (*stored.token_ids[: write.base_len], *write.token_ids, *stored.token_ids[end:])
        committed_len = len(token_ids) - stored.record.prompt_len
        record = replace(
            stored.record, epoch=write.epoch, owner=write.owner, committed_len=committed_len, state=write.state
        )
        self._write(record, token_ids, stored.ttl_s)
        return Written.DONE

    async def note(self, name: str) -> bytes | None:
        """Returns a note."""
        content, ends_s = self._notes.get(name, (None, 0.0))
        return content if self._clock() < ends_s else None

    async def write_note(self, name: str, content: bytes, *, ttl_s: float, new: bool = False) -> bool:
        """Writes a note."""
        if new and await self.note(name) is not None:
            return False
        self._notes[name] = content, self._clock() + ttl_s
        return True

    def _write(self, record: SessionRecord, token_ids: tuple[int, ...], ttl_s: float) -> None:
        now_s = self._clock()
        for session_id in [key for key, stored in self._sessions.items() if stored.expires_s <= now_s]:
            del self._sessions[session_id]
        self._sessions[record.session_id] = _StoredSession(
            record=record, token_ids=token_ids, ttl_s=ttl_s, expires_s=now_s + ttl_s
        )

    def _alive(self, session_id: str) -> _StoredSession | None:
        stored = self._sessions.get(session_id)
        if stored is not None and stored.expires_s <= self._clock():
            del self._sessions[session_id]
            return None
        return stored

    async def keep(self, document: Document, *, ttl_s: float, room_bytes: int, replaces: bool = False) -> Keeping:
        """Writes a document in place of one of a lower rank."""
        now_s = self._clock()
        self._documents = {each: stored for each, stored in self._documents.items() if stored.expires_s > now_s}
        own = document.keeper, document.name
        known = self._documents.get(own)
        if known is not None and known.document.rank >= document.rank:
            return Keeping.OUTRANKED
        if known is None and replaces:
            return Keeping.MISSING
        if document.size > room_bytes:
            return Keeping.TOO_LARGE
        self._documents.pop(own, None)
        self._make_room(document, room_bytes)
        self._documents[own] = _StoredDocument(document=document, expires_s=now_s + ttl_s)
        return Keeping.DONE

    def _make_room(self, document: Document, room_bytes: int) -> None:
        held: Counter[str] = Counter()
        for keeper, name in self._documents:
            held[keeper] += self._documents[keeper, name].document.size
        while held.total() + document.size > room_bytes:
            mine = held[document.keeper]
            loser = max(held, key=lambda keeper: held[keeper])
            if mine and mine + document.size >= held[loser]:
                loser = document.keeper
            oldest = next(each for each in self._documents if each[0] == loser)
            held[loser] -= self._documents.pop(oldest).document.size

    async def kept(self, keeper: str, name: str) -> Document | None:
        """Returns a document."""
        stored = self._documents.get((keeper, name))
        return None if stored is None or stored.expires_s <= self._clock() else stored.document

    async def forget(self, keeper: str, name: str) -> bool:
        """Deletes a document."""
        known = await self.kept(keeper, name) is not None
        self._documents.pop((keeper, name), None)
        return known
