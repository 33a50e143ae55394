"""Documents inside one process, by the same contract as those on a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from paceline.store.documents import Document, Keeping

_Id = tuple[str, str]


@dataclass(slots=True)
class _Stored:
    document: Document
    expires_s: float
    worked_on_until_s: float


class MemoryDocuments:
    """Documents that end with their process; `clock` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # The oldest first.
        self._stored: dict[_Id, _Stored] = {}

    async def keep(
        self, document: Document, *, ttl_s: float, work_s: float, room_bytes: int, replaces: bool = False
    ) -> Keeping:
        """Writes a document in place of one of a lower rank."""
        now_s = self._clock()
        self._stored = {each: stored for each, stored in self._stored.items() if stored.expires_s > now_s}
        own = document.keeper, document.name
        known = self._stored.get(own)
        if known is not None and known.document.rank >= document.rank:
            return Keeping.OUTRANKED
        if known is None and replaces:
            return Keeping.MISSING
        if document.size > room_bytes:
            return Keeping.TOO_LARGE
        self._stored.pop(own, None)
        self._make_room(document, room_bytes)
        worked_on_until_s = now_s + work_s if document.at_work else now_s
        self._stored[own] = _Stored(document, now_s + ttl_s, worked_on_until_s)
        return Keeping.DONE

    def _make_room(self, document: Document, room_bytes: int) -> None:
        held: Counter[str] = Counter()
        for keeper, name in self._stored:
            held[keeper] += self._stored[keeper, name].document.size
        while held.total() + document.size > room_bytes:
            mine = held[document.keeper]
            loser = max(held, key=lambda keeper: held[keeper])
            if mine and mine + document.size >= held[loser]:
                loser = document.keeper
            oldest = next(each for each in self._stored if each[0] == loser)
            held[loser] -= self._stored.pop(oldest).document.size

    async def work_on(self, documents: Sequence[_Id], work_s: float) -> None:
        """Marks documents as worked on."""
        for each in documents:
            if each in self._stored:
                self._stored[each].worked_on_until_s = self._clock() + work_s

    async def kept(self, keeper: str, name: str) -> Document | None:
        """Returns a document."""
        stored, now_s = self._stored.get((keeper, name)), self._clock()
        if stored is None or stored.expires_s <= now_s:
            return None
        return replace(stored.document, at_work=stored.worked_on_until_s > now_s)

    async def forget(self, keeper: str, name: str) -> bool:
        """Deletes a document."""
        known = await self.kept(keeper, name) is not None
        self._stored.pop((keeper, name), None)
        return known
