"""What a step verifies of the guesses, whether it waits for more of them, and which prices drafters receive.

The part of a scheduler that knows drafts, and nothing of pages, rows or places: our engine's scheduler, and that of the
tier under vLLM, share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from paceline.core.draft_policy import Goodput
from paceline.core.moving_average import MovingAverage
from paceline.core.tree import DraftTree
from paceline.forest import Bools, Floats, Forest, Ints, Taken, rows_of

# Seconds of a step before one was seen.
FIRST_STEP_S = 0.01
# No step waits for less, or rounding could keep simulated time from going on.
LEAST_WAIT_S = 1e-6


class SpeculatingSession(Protocol):
    """A session as far as its guesses go."""

    tree: DraftTree
    has_sources: bool

    @property
    def cap(self) -> int:
        """Most nodes that may be verified now."""
        ...

    @property
    def may_wait(self) -> bool:
        """False for a session that must not be delayed for drafts."""
        ...

    @property
    def takes_chains(self) -> bool:
        """Whether a step verifies one chain of it instead of a tree."""
        ...


class Choice(NamedTuple):
    """What a step verifies.

    Attributes:
        counts: int32 `[sessions]`, nodes of each that decodes.
        rows: int32 `[nodes]`, rows of the forest.
        taken: The nodes, session by session.
    """

    counts: Ints
    rows: Ints
    taken: Taken


_NOTHING = rows_of(()), Taken(*np.empty((4, 0), np.int32))


class StepDrafts:
    """The drafts of the steps of one engine.

    Args:
        policy: Which nodes a step verifies.
        forest: The trees of all sessions.

    Attributes:
        step_s: Seconds that a step usually takes.
    """

    def __init__(self, policy: Goodput, forest: Forest) -> None:
        self._policy = policy
        self._forest = forest
        self._usual_step = MovingAverage(FIRST_STEP_S)

    @property
    def step_s(self) -> float:
        """Seconds that a step usually takes."""
        return self._usual_step.value

    def took(self, seconds: float) -> None:
        """Takes in the time of a step."""
        self._usual_step.add(seconds)

    def cap(self, session: SpeculatingSession) -> int:
        """Most nodes of a session in a step."""
        return min(session.cap, self._policy.max_nodes)

    def drafters_work(self, sessions: Sequence[SpeculatingSession]) -> bool:
        """Whether drafters are at work for any of the sessions."""
        at_work = self._forest.links.at_work(_rows_of(sessions))
        return any(self.cap(sessions[index]) for index in np.flatnonzero(at_work).tolist())

    def choose(
        self,
        decoding: Sequence[SpeculatingSession],
        joining: Sequence[SpeculatingSession],
        *,
        other_rows: int = 0,
        most_each: int | None = None,
    ) -> Choice:
        """Decides whether the next step drafts; picks what it verifies, and sets the prices that drafters receive.

        Args:
            decoding: Sessions that decode in it.
            joining: Those whose prompts are read: their drafters read along, unless the price makes them idle.
            other_rows: Rows of the step that are taken.
            most_each: Most nodes of a session; None: its own bound.
        """
        sessions, links = [*decoding, *joining], self._forest.links
        rows, caps = _rows_of(sessions), rows_of(map(self.cap, sessions))
        drafted = links.drafted(rows) & (caps > 0)
        speculate = drafted.any() or any(cap and each.has_sources for cap, each in zip(caps, sessions, strict=True))
        if not self._policy.enter(len(sessions) if speculate else 0):
            links.idle(rows)
            return Choice(np.zeros(len(decoding), np.int32), *_NOTHING)
        able = np.flatnonzero(caps)
        caps[able[self._policy.num_drafting(len(able)) :]] = 0
        mine = slice(len(decoding))
        most = caps[mine] if most_each is None else np.minimum(caps[mine], most_each)
        picked = self._forest.best(rows[mine], most, _chains_of(decoding))
        answered = links.answered(rows[mine])[drafted[mine] & (most > 0)]
        counts = self._policy.allocate(picked, answered=answered, other_rows=other_rows)
        links.look_ahead(rows, caps, price=self._policy.price, step_s=self.step_s)
        return Choice(counts, rows[mine].repeat(counts), self._forest.take(rows[mine], picked.slots, counts))

    def num_silenced(self, sessions: Sequence[SpeculatingSession], now_s: float) -> int:
        """Marks drafters whose answers are overdue, so that no step waits for them; returns how many became so."""
        if not self._policy.drafts:
            return 0
        rows = _rows_of([session for session in sessions if session.may_wait])
        return self._forest.links.mark_silent(rows, now_s)

    def waits(self, sessions: Sequence[SpeculatingSession], now_s: float) -> Floats:
        """By session the seconds until its next nodes, `[sessions]`; NaN: never."""
        seconds = self._forest.links.waits(_rows_of(sessions), now_s)
        seconds[np.array([not session.may_wait for session in sessions], np.bool_)] = np.nan
        return seconds

    def pays(self, sessions: Sequence[SpeculatingSession], draft_s: float, *, idle_s: float) -> bool:
        """Whether a draft step of `draft_s` seconds for all sessions is worth waiting for."""
        drafted = self._forest.links.drafted(_rows_of(sessions))
        may_wait = np.array([session.may_wait for session in sessions], np.bool_)
        return self.worth_waiting(sessions, np.where(drafted & may_wait, draft_s, np.nan), idle_s=idle_s) > 0.0

    def lag_tokens(self, sessions: Sequence[SpeculatingSession]) -> int:
        """Most committed tokens of a session that its drafter has not answered; none while drafters idle."""
        return self._forest.links.lag_tokens(_rows_of(sessions))

    def worth_waiting(self, sessions: Sequence[SpeculatingSession], waits: Floats, *, idle_s: float) -> float:
        """Seconds for which the next nodes are worth waiting for, at most a step in all.

        Args:
            sessions: Those that decode.
            waits: See `waits`.
            idle_s: For how long the engine has been waiting.
        """
        left_s = self.step_s - idle_s
        never = np.isnan(waits)
        if left_s <= LEAST_WAIT_S or never.all():
            return 0.0
        rows, links = _rows_of(sessions), self._forest.links
        expected, gains = self._forest.prospects(
            rows,
            rows_of(map(self.cap, sessions)),
            np.where(never, 1.0, links.prices(rows)),
            links.child_shares(rows),
            _chains_of(sessions),
        )
        gainful = waits[~never & (gains != 0.0)]
        if not len(gainful) or not self._policy.waits(expected, gains, wait_s=float(gainful.min()), step_s=self.step_s):
            return 0.0
        return min(float(gainful.max()), left_s)


def _rows_of(sessions: Sequence[SpeculatingSession]) -> Ints:
    return rows_of(each.tree.row for each in sessions)


def _chains_of(sessions: Sequence[SpeculatingSession]) -> Bools:
    """Whether chains of them are verified, `[sessions]`."""
    return np.array([each.takes_chains for each in sessions], np.bool_)
