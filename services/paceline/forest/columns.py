"""What operations of a forest take and return: columns, one number for each session, message, commit or node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.forest.records import Bools, Floats, Ints


def rows_of(rows: Iterable[int]) -> Ints:
    """Numbers as kernels take them, int32 `[n]`."""
    return np.fromiter(rows, np.int32)


class Merged(NamedTuple):
    """What became of messages.

    Attributes:
        counts: int32 `[messages, 3]`, guesses added, those that fell off, and those without a parent or a place.
        firsts: float64 `[messages]`, best survival of a first guess, of those that know the last commit; else -1.
        levels: int32 `[messages]`, by how many they have deepened trees, of those that know the last commit; else 0.
    """

    counts: Ints
    firsts: Floats
    levels: Ints


class Coming(NamedTuple):
    """What the next message of a drafter usually brings to sessions.

    Attributes:
        child_shares: float64 `[sessions]`, survival of a node's best child over that of the node.
        levels: float64 `[sessions]`, levels of guesses, each below the best of the one before.
    """

    child_shares: Floats
    levels: Floats


class Committed(NamedTuple):
    """What commits did.

    Attributes:
        accepted: int32 `[commits]`, tokens that were in the tree and had a row of KV.
        hits: bool `[commits]`, whether all were in the tree.
        moves: int32 `[n, 2]`, KV and position of the accepted nodes, commit by commit.
        freed: int32 `[n]`, KV of nodes that fell off.
        counts: int64 `[3, sources]`, nodes with a row that were judged, those of them that matched, and nodes that went
            without a row, by the source that guessed them first.
    """

    accepted: Ints
    hits: Bools
    moves: Ints
    freed: Ints
    counts: npt.NDArray[np.int64]


class Picked(NamedTuple):
    """The best nodes of some sessions.

    Attributes:
        slots: int32 `[sessions, most]`, best first, NONE behind the last.
        survivals: float64 `[sessions, most]`, 0 behind the last.
    """

    slots: Ints
    survivals: Floats


class Gathered(NamedTuple):
    """Nodes that a step verifies, session by session, parents before children: int32 `[nodes]` each.

    Attributes:
        parents: Which of the session's nodes here each one hangs below; ROOT: the root.
    """

    slots: Ints
    tokens: Ints
    positions: Ints
    parents: Ints


class Guesses(NamedTuple):
    """Guesses that a step verifies, session by session, parents before children, in columns.

    Attributes:
        counts: int32 `[sessions]`, how many each session has.
        tokens: int32 `[guesses]`.
        positions: int32 `[guesses]`, absolute.
        parents: int32 `[guesses]`, which of its session's guesses each one hangs below; ROOT: the root.
        kv: int32 `[guesses]`, scratch slots.
    """

    counts: Ints
    tokens: Ints
    positions: Ints
    parents: Ints
    kv: Ints

    @property
    def deepest(self) -> list[int]:
        """The last position of each session, 0 of one without guesses."""
        last = np.zeros(len(self.counts), np.int32)
        np.maximum.at(last, np.repeat(np.arange(len(last)), self.counts), self.positions)
        return last.tolist()

    def of(self, place: int) -> Guesses:
        stop = int(self.counts[: place + 1].sum())
        mine = slice(stop - int(self.counts[place]), stop)
        return Guesses(self.counts[place : place + 1], *(column[mine] for column in self[1:]))

    def without(self, places: Sequence[int]) -> Guesses:
        """All but those of some sessions."""
        counts = self.counts.copy()
        counts[places] = 0
        left = np.repeat(counts > 0, self.counts)
        return Guesses(counts, *(column[left] for column in self[1:]))


NO_GUESSES = Guesses(*np.zeros((5, 0), np.int32))


class Calls(NamedTuple):
    """Nodes whose children a drafter computes next: int32 `[nodes]` each, best first."""

    rows: Ints
    slots: Ints


class Pushed(NamedTuple):
    """Nodes that verifiers are to know: `[nodes]` each, and int32 `[sessions]` where those of a session end."""

    ids: Ints
    parent_ids: Ints
    tokens: Ints
    positions: Ints
    confidences: Floats
    ends: Ints

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Floats]:
        """Ids, parents' ids, tokens and confidences of the nodes that are due."""
        end = self.ends[-1]
        return self.ids[:end], self.parent_ids[:end], self.tokens[:end], self.confidences[:end]
