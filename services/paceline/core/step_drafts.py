"""What a step verifies of the guesses, whether it waits for more of them, and which prices drafters receive.

The part of a scheduler that knows drafts, and nothing of pages, rows or places: our engine's scheduler, and that of the
tier under vLLM, share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from paceline.core.draft_policy import Demand, Goodput
from paceline.core.link import CHILD_SHARE, SessionLink
from paceline.core.moving_average import MovingAverage
from paceline.core.tree import DraftTree
from paceline.forest import Bools, Forest, Ints, Taken, rows_of

# Seconds of a step before one was seen.
FIRST_STEP_S = 0.01
# No step waits for less, or rounding could keep simulated time from going on.
LEAST_WAIT_S = 1e-6


class SpeculatingSession(Protocol):
    """A session as far as its guesses go."""

    tree: DraftTree
    link: SessionLink
    has_sources: bool
    committed_len: int

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
        counts: Nodes of each decoding session.
        rows: int32 `[nodes]`, rows of the forest.
        taken: The nodes, session by session.
    """

    counts: list[int]
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
        return any(each.link.drafter and each.link.price < 1.0 and self.cap(each) for each in sessions)

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
        sessions = [*decoding, *joining]
        caps = [self.cap(session) for session in sessions]
        speculate = any(
            cap and (each.link.drafter or each.has_sources) for each, cap in zip(sessions, caps, strict=True)
        )
        if not self._policy.enter(len(sessions) if speculate else 0):
            for session in sessions:
                session.link.idle()
            return Choice([0] * len(decoding), *_NOTHING)
        demands = [
            Demand(
                cap=cap if most_each is None else min(cap, most_each),
                drafted=session.link.drafter is not None,
                answered=session.link.has_answered,
            )
            for session, cap in zip(decoding, caps, strict=False)
        ]
        rows, chains = _rows_of(decoding)
        picked = self._forest.best(rows, rows_of(each.cap for each in demands), chains)
        counts = self._policy.allocate(demands, picked, other_rows=other_rows)
        for session, cap in zip(sessions, caps, strict=True):
            session.link.look_ahead(self._policy.price if cap else 1.0, cap, self.step_s)
        return Choice(counts.tolist(), rows.repeat(counts), self._forest.take(rows, picked.slots, counts))

    def num_silenced(self, sessions: Sequence[SpeculatingSession], now_s: float) -> int:
        """Marks drafters whose answers are overdue, so that no step waits for them; returns how many became so."""
        if not self._policy.drafts:
            return 0
        return sum(session.may_wait and session.link.mark_silent(now_s) for session in sessions)

    def waits(self, sessions: Sequence[SpeculatingSession], now_s: float) -> list[float | None]:
        """By session the seconds until its next nodes; None: never."""
        return [session.link.wait_s(now_s) if session.may_wait else None for session in sessions]

    def worth_waiting(
        self, sessions: Sequence[SpeculatingSession], waits: Sequence[float | None], *, idle_s: float
    ) -> float:
        """Seconds for which the next nodes are worth waiting for, at most a step in all.

        Args:
            sessions: Those that decode.
            waits: See `waits`.
            idle_s: For how long the engine has been waiting.
        """
        left_s = self.step_s - idle_s
        if left_s <= LEAST_WAIT_S or all(wait_s is None for wait_s in waits):
            return 0.0
        rows, chains = _rows_of(sessions)
        prices = [
            1.0 if wait_s is None else session.link.price for session, wait_s in zip(sessions, waits, strict=True)
        ]
        expected, gains = self._forest.prospects(
            rows,
            rows_of(map(self.cap, sessions)),
            np.array(prices),
            np.array([_child_share(session) for session in sessions]),
            chains,
        )
        gainful = [wait_s for wait_s, gain in zip(waits, gains.tolist(), strict=True) if wait_s is not None and gain]
        if not gainful or not self._policy.waits(expected, gains, wait_s=min(gainful), step_s=self.step_s):
            return 0.0
        return min(max(gainful), left_s)


def _rows_of(sessions: Sequence[SpeculatingSession]) -> tuple[Ints, Bools]:
    """Rows of sessions in the forest, and whether chains of them are verified, `[sessions]`."""
    return rows_of(each.tree.row for each in sessions), np.array([each.takes_chains for each in sessions], np.bool_)


def _child_share(session: SpeculatingSession) -> float:
    drafter = session.link.drafter
    return CHILD_SHARE if drafter is None else drafter.child_share.value
