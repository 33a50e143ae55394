"""Plan and results of a drafter's next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from paceline.engine.draft_session import DraftSession
from paceline.engine.pending import Longs
from paceline.forest import NONE, ROOT, Bools, Calls, Ints, rows_of

# Committed tokens that a session may lack after a round; who lacks more is behind.
MOST_FRESH = 16

_ONE_LEVEL = np.empty((0, 0), np.int32)


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """Committed tokens of a session whose KV a step computes.

    Attributes:
        start: First row of its pages.
        stop: End of the rows, exclusive.
        expands: Whether the children of the root are wanted, too.
    """

    session: DraftSession
    start: int
    stop: int
    expands: bool


class Start(NamedTuple):
    """A root or node whose children a step computes; `path` are the tokens from below the root down to it."""

    session: DraftSession
    slot: int
    path: Sequence[int]


@dataclass(frozen=True, slots=True)
class Starts:
    """Roots and nodes whose children a step computes, in columns: roots first, then nodes, the best first.

    Args:
        sessions: Theirs, each once.
        rows: int32 `[sessions]`, of these in the forest.
        each: int64 `[starts]`, indices of these.
        slots: int32 `[starts]`, of nodes in the forest, until the next commit; ROOT: a root.
        ends: int32 `[starts]`, where the path of each ends.
        depths: int32 `[starts]`, tokens of these; 0: a root.
        path: int32 `[n]`, tokens from below the root down to each.
        kv: int32 `[n]`, scratch slots of the same.
    """

    sessions: Sequence[DraftSession]
    rows: Ints
    each: Longs
    slots: Ints
    ends: Ints
    depths: Ints
    path: Ints
    kv: Ints

    @classmethod
    def at_roots(cls, sessions: Sequence[DraftSession]) -> Starts:
        """The roots of some trees."""
        count = len(sessions)
        slots, nothing = np.full(count, ROOT, np.int32), np.zeros(count, np.int32)
        rows = rows_of([session.row for session in sessions])
        return cls(sessions, rows, np.arange(count), slots, nothing, nothing, nothing[:0], nothing[:0])

    def __len__(self) -> int:
        return len(self.each)

    def __iter__(self) -> Iterator[Start]:
        columns = self.each, self.slots, self.ends, self.depths
        for each, slot, end, depth in zip(*(column.tolist() for column in columns), strict=True):
            yield Start(self.sessions[each], slot, self.path[end - depth : end].tolist())

    def __add__(self, more: Starts) -> Starts:
        if not len(self):
            return more
        return Starts(
            [*self.sessions, *more.sessions],
            np.concatenate((self.rows, more.rows)),
            np.concatenate((self.each, len(self.sessions) + more.each)),
            np.concatenate((self.slots, more.slots)),
            np.concatenate((self.ends, len(self.path) + more.ends)),
            np.concatenate((self.depths, more.depths)),
            np.concatenate((self.path, more.path)),
            np.concatenate((self.kv, more.kv)),
        )

    def only(self, some: Bools) -> Starts:
        """Some of them."""
        return replace(
            self, each=self.each[some], slots=self.slots[some], ends=self.ends[some], depths=self.depths[some]
        )

    def of(self, wanted: Callable[[DraftSession], bool]) -> Bools:
        """Which are those of some sessions, bool `[starts]`."""
        found: Bools = np.array([wanted(session) for session in self.sessions], np.bool_)[self.each]
        return found

    @property
    def calls(self) -> Calls:
        """Their names in the forest."""
        return Calls(self.rows[self.each], self.slots)

    @property
    def by_logits(self) -> Bools:
        """Which are of sessions that are drafted for by logits alone, bool `[starts]`."""
        found: Bools = np.array([session.by_logits for session in self.sessions], np.bool_)[self.each]
        return found

    @property
    def lengths(self) -> Longs:
        """Tokens up to each, those of its path included, int64 `[starts]`."""
        lengths: Longs = np.array([len(session.tokens) for session in self.sessions], np.int64)[self.each] + self.depths
        return lengths


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The plan of a step.

    Attributes:
        growing: Nodes whose children are computed.
        starts: Roots that sessions which catch up expand, and these nodes.
        kv: int32 `[levels - 1, starts]`, scratch slots for the best guess of each further level that is drafted below
            those that `catching_up` expands and those that are `growing`; NONE: the level is its last one.
    """

    catching_up: list[CatchingUp] = field(default_factory=list)
    growing: Starts = field(default_factory=lambda: Starts.at_roots(()))
    starts: Starts = field(default_factory=lambda: Starts.at_roots(()))
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
        return sum([each.stop - each.start for each in self.catching_up]) + len(self.growing)

    def shares(self) -> dict[int, float]:
        """Share of each verifier's stream in the rows of all levels."""
        rows = Counter[int]()
        for each in self.catching_up:
            rows[each.session.link] += each.stop - each.start
        # Rows of roots at the first level are those that catch up.
        num_rows = np.zeros(len(self.starts), np.int64) if not len(self.kv) else (self.kv != NONE).sum(axis=0)
        num_rows[len(self.starts) - len(self.growing) :] += 1
        by_session = np.bincount(self.starts.each, num_rows, minlength=len(self.starts.sessions))
        for session, count in zip(self.starts.sessions, by_session.tolist(), strict=True):
            rows[session.link] += int(count)
        total = max(1, rows.total())
        return {link: count / total for link, count in rows.items()}
