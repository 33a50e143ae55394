"""What a step verifies of the guesses, whether it waits for more of them, and which prices drafters are told.

The part of a scheduler that knows drafts, and nothing of pages, rows or places: our engine's scheduler, and that of the
tier under vLLM, share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.demand import Demand
from paceline.core.draft_policy import Allocation, DraftPolicy
from paceline.core.link import SessionLink
from paceline.core.step_time import StepMode
from paceline.core.survivals import SessionSurvivals
from paceline.core.tree import DraftTree
from paceline.core.wait_for_drafts import CHILD_SHARE, Prospect, prospect, worth_waiting

# Smoothing of the step time that waiting is weighed against, and what it is before a step was seen.
STEP_SMOOTHING, FIRST_STEP_S = 0.1, 0.01


class GuessedSession(Protocol):
    """A session as far as its guesses go."""

    tree: DraftTree
    link: SessionLink
    usual: SessionSurvivals
    own_survivals: list[float]

    @property
    def committed_len(self) -> int:
        """Prompt and generated tokens."""
        ...

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


class StepDrafts:
    """The drafts of the steps of one engine.

    Args:
        policy: Which nodes a step verifies.

    Attributes:
        step_s: Seconds that a step usually takes.
    """

    def __init__(self, policy: DraftPolicy) -> None:
        self._policy = policy
        self.step_s = FIRST_STEP_S

    def took(self, seconds: float) -> None:
        """A step took so long."""
        self.step_s += STEP_SMOOTHING * (seconds - self.step_s)

    def cap(self, session: GuessedSession) -> int:
        """Most nodes of a session in a step."""
        return min(session.cap, self._policy.max_nodes)

    def mode(self, sessions: Sequence[GuessedSession]) -> StepMode:
        """Whether drafters are at work for any of the sessions."""
        works = any(each.link.drafter and each.link.price < 1.0 and self.cap(each) for each in sessions)
        return StepMode.DRAFTING if works else StepMode.PLAIN

    def choose(
        self,
        decoding: Sequence[GuessedSession],
        joining: Sequence[GuessedSession],
        *,
        other_rows: int = 0,
        most_each: int | None = None,
    ) -> Allocation:
        """Picks what the next step verifies, and sets what drafters are told with its commits.

        Args:
            decoding: Sessions that decode in it.
            joining: Those whose prompts are read: their drafters read along, unless the price sends them to rest.
            other_rows: Rows of the step that are spoken for.
            most_each: Most nodes of a session; None: its own bound.
        """
        demands = [self._demand(session, most_each) for session in decoding]
        drafted = [session.link.drafter is not None and self.cap(session) > 0 for session in joining]
        allocation = self._policy.allocate(demands, other_rows=other_rows, joining=drafted)
        prices = [*allocation.prices, *(allocation.price for _ in joining)]
        for session, price in zip([*decoding, *joining], prices, strict=True):
            session.link.look_ahead(price, self.cap(session), self.step_s)
        return allocation

    def _demand(self, session: GuessedSession, most_each: int | None) -> Demand:
        cap = self.cap(session)
        return Demand(
            tree=session.tree,
            cap=cap if most_each is None else min(cap, most_each),
            chain=session.takes_chains,
            drafted=session.link.drafter is not None,
            answered=session.link.has_answered,
            own=session.own_survivals,
            num_unread=session.committed_len - session.link.told_len,
            usual=session.usual,
        )

    def num_silenced(self, sessions: Sequence[GuessedSession], now_s: float) -> int:
        """Drafters whose answers are overdue are not waited for until they are heard again; returns how many more."""
        return sum(session.may_wait and session.link.silences(now_s) for session in sessions)

    def waits(self, sessions: Sequence[GuessedSession], now_s: float) -> list[float | None]:
        """By session the seconds until its next nodes; None: never."""
        return [session.link.wait_s(now_s) if session.may_wait else None for session in sessions]

    def worth_waiting(
        self, sessions: Sequence[GuessedSession], waits: Sequence[float | None], *, idle_s: float
    ) -> float:
        """Seconds for which the next nodes are worth waiting for, at most a step in all.

        Args:
            sessions: Those that decode.
            waits: See `waits`.
            idle_s: For how long the engine has been waiting.
        """
        return worth_waiting(
            waits,
            lambda: [self._prospect(session, wait_s) for session, wait_s in zip(sessions, waits, strict=True)],
            lambda looks, wait_s: self._policy.waits(looks, wait_s=wait_s, step_s=self.step_s),
            left_s=self.step_s - idle_s,
        )

    def _prospect(self, session: GuessedSession, wait_s: float | None) -> Prospect:
        drafter = session.link.drafter
        return prospect(
            session.tree,
            self.cap(session),
            price=1.0 if wait_s is None else session.link.price,
            child_share=CHILD_SHARE if drafter is None else drafter.child_share,
            chain=session.takes_chains,
        )
