"""Documents that gateways keep for their callers: bounded in all, ranked, and marked while somebody works on them.

Each belongs to a keeper, the API key of its request, and cannot be read under another. All documents together have so
much room. Where it ends, the keeper that holds most loses its oldest ones: so a keeper can always hold an equal share,
and more while others leave room.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

# The rank that nothing replaces.
FINAL = 1 << 52
# What a document costs the store beside its body.
OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """What is kept.

    Attributes:
        keeper: Whom it is kept for; empty: anyone.
        name: Its name among the keeper's, without a colon.
        body: Any bytes.
        rank: Only a document of a higher rank takes its place.
        at_work: Whether somebody works on it.
    """

    keeper: str
    name: str
    body: bytes
    rank: int
    at_work: bool = False

    @property
    def size(self) -> int:
        """The bytes that it takes of the room."""
        return len(self.body) + OVERHEAD_BYTES


class Keeping(enum.Enum):
    """Outcome of a write; only `DONE` changed the store."""

    DONE = "done"
    OUTRANKED = "a document of the same or a higher rank is there"
    MISSING = "there is nothing to replace any more"
    TOO_LARGE = "it does not fit into the room of all documents"


class Documents(Protocol):
    """Documents of all keepers. Every method raises `UnavailableError` when the server does not answer in time."""

    async def keep(
        self, document: Document, *, ttl_s: float, work_s: float, room_bytes: int, replaces: bool = False
    ) -> Keeping:
        """Writes a document in place of one of a lower rank, in one atomic step.

        Args:
            document: If it is `at_work`, it counts as such for `work_s` seconds.
            ttl_s: Life of the document in seconds.
            work_s: See there.
            room_bytes: Room for all documents of all keepers.
            replaces: Whether it is written only if there is one to replace.
        """

    async def work_on(self, documents: Sequence[tuple[str, str]], work_s: float) -> None:
        """Marks documents, by keeper and name, as worked on for `work_s` seconds from now."""

    async def kept(self, keeper: str, name: str) -> Document | None:
        """Returns a document; None if it is unknown, or no longer kept."""

    async def forget(self, keeper: str, name: str) -> bool:
        """Deletes a document; returns whether there was one."""
