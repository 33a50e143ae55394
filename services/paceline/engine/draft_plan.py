"""What a drafter's next step computes, and what comes of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.engine.draft_session import DraftSession
from paceline.forest import Calls, Ints

# Committed tokens that a session may lack after a round; who lacks more is behind.
MOST_FRESH = 16

_ONE_LEVEL = np.empty((0, 0), np.int32)


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """Committed tokens of a session whose KV a step computes.

    Attributes:
        start: First row of its pages.
        stop: One more than the last.
        expands: Whether the children of the root are wanted, too.
    """

    session: DraftSession
    start: int
    stop: int
    expands: bool


@dataclass(frozen=True, slots=True)
class Expansion:
    """A node whose children a step computes.

    Attributes:
        slot: Of the node in the forest, until the next commit.
        position: Of the node.
        path: Tokens from below the root down to it.
        kv: Scratch slots of the same.
    """

    session: DraftSession
    slot: int
    position: int
    path: Sequence[int]
    kv: Sequence[int]


@dataclass(frozen=True, slots=True)
class Growing:
    """The nodes whose children a step computes, of all sessions, best first.

    Args:
        sessions: By their rows in the forest.
        ends: int32 `[nodes]`, where the path of each ends.
        path: int32 `[n]`, tokens from below the root down to each.
        kv: int32 `[n]`, scratch slots of the same.
    """

    sessions: Mapping[int, DraftSession]
    calls: Calls
    ends: Ints
    path: Ints
    kv: Ints

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[Expansion]:
        path, kv, start = self.path.tolist(), self.kv.tolist(), 0
        for row, slot, end in zip(self.calls.rows.tolist(), self.calls.slots.tolist(), self.ends.tolist(), strict=True):
            session = self.sessions[row]
            yield Expansion(session, slot, len(session.tokens) + end - start - 1, path[start:end], kv[start:end])
            start = end


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """One step.

    Attributes:
        kv: int32 `[levels - 1, starts]`, scratch slots for the best guess of each further level that is drafted below
            those that `catching_up` expands and those that are `growing`; NONE: the level is its last one.
    """

    catching_up: list[CatchingUp] = field(default_factory=list)
    growing: Growing | tuple[()] = ()
    kv: Ints = field(default_factory=lambda: _ONE_LEVEL)

    @property
    def reads(self) -> bool:
        """Whether more than what a round commits is computed."""
        return any(each.stop - each.start > MOST_FRESH for each in self.catching_up)

    @property
    def num_levels(self) -> int:
        """Steps of the model, one after the other."""
        return 1 + len(self.kv)

    @property
    def num_rows(self) -> int:
        """Rows to compute; 0: there is nothing to do."""
        return sum(each.stop - each.start for each in self.catching_up) + len(self.growing)
