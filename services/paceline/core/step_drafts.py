"""Chooses the guesses that a step verifies, whether it waits for more, and the prices that drafters receive.

The part of a scheduler that knows drafts, and nothing of pages, rows or places: our engine's scheduler, and that of the
tier under vLLM, share it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.core.draft_policy import Goodput
from paceline.core.target_events import StepReport
from paceline.forest import Floats, Forest, Gathered, Ints, Standing, rows_of

# No step waits for less, or rounding could keep simulated time from going on.
LEAST_WAIT_S = 1e-6


class Choice(NamedTuple):
    """The guesses that a step verifies.

    Attributes:
        counts: int32 `[sessions]`, nodes of each that decodes.
        rows: int32 `[nodes]`, rows of the forest.
        taken: The nodes, session by session.
    """

    counts: Ints
    rows: Ints
    taken: Gathered


_NOTHING = rows_of(()), Gathered(*np.empty((4, 0), np.int32))


class StepDrafts:
    """The drafts of the steps of one engine.

    Args:
        policy: Which nodes a step verifies.
        forest: The trees of all sessions.
    """

    def __init__(self, policy: Goodput, forest: Forest) -> None:
        self._policy = policy
        self._forest = forest
        # Sessions of steps that drafted, each with a drafter and without a guess.
        self._num_unmet = 0

    @property
    def step_s(self) -> float:
        """Seconds that a step usually takes."""
        return self._policy.step_s

    def _standing(self, rows: Ints) -> Standing:
        return self._forest.links.standing(rows, self._policy.max_nodes)

    def drafters_work(self, rows: Ints) -> bool:
        """Whether drafters are at work for any of the sessions."""
        return bool(self._standing(rows).works.any())

    def choose(
        self,
        decoding: Ints,
        joining: Ints,
        *,
        other_rows: int = 0,
        most_each: int | None = None,
    ) -> Choice:
        """Decides whether the next step drafts; picks what it verifies, and sets the prices that drafters receive.

        Args:
            decoding: Rows of sessions that decode in it.
            joining: Sessions in prefill: their drafters read along, unless the price makes them idle.
            other_rows: Rows of the step that are taken.
            most_each: Most nodes of a session; None: its own bound.
        """
        rows, links = np.concatenate((decoding, joining)), self._forest.links
        if not len(rows):
            return Choice(rows, *_NOTHING)
        at = self._standing(rows)
        may_have = at.caps > 0
        drafters, sources = (bool((each & may_have).any()) for each in (at.drafted, at.sourced))
        drafts = self._policy.enter(len(rows), drafters=drafters, sources=sources)
        if not drafts:
            links.idle(rows)
        if not (drafts or (sources and self._policy.guesses)):
            return Choice(np.zeros(len(decoding), np.int32), *_NOTHING)
        caps, mine = at.caps, at.first(len(decoding))
        most = mine.caps if most_each is None else np.minimum(mine.caps, most_each)
        picked, weights = self._forest.best(decoding, most, mine.chains), self._policy.weights(links.lens(rows))
        waiting, answered = mine.drafted & (most > 0), mine.answered
        responded = answered[waiting] if drafts else None
        counts = self._policy.allocate(
            picked, responded=responded, other_rows=other_rows, weights=weights[: len(decoding)]
        )
        if drafts:
            has_guess = (picked.survivals > 0.0).any(axis=1)
            self._num_unmet += int((waiting & ~answered & ~has_guess).sum())
            links.look_ahead(rows, caps, prices=self._policy.prices(weights), step_s=self.step_s)
        return Choice(counts, decoding.repeat(counts), self._forest.gather(decoding, picked.slots, counts))

    def call(self, fresh: Ints) -> None:
        """Gives new sessions a price and room before they are opened: without, a drafter reads the prompt and stops."""
        if self._policy.drafts:
            caps = self._standing(fresh).caps
            prices = np.full(len(fresh), self._policy.price)
            self._forest.links.look_ahead(fresh, caps, prices=prices, step_s=self.step_s)

    def describe(self, report: StepReport) -> None:
        """Adds to a report the mode of its step, at which price, why, and the rates of all modes."""
        policy = self._policy
        report.price, report.mode, report.reason = policy.price, policy.mode.mode, policy.reason
        report.measured = policy.measured
        report.responded = self._policy.responded
        if self._num_unmet:
            report.count("paceline:unmet_drafts", by=self._num_unmet)
            self._num_unmet = 0

    def mark_silent(self, rows: Ints, now_s: float, report: StepReport) -> None:
        """Marks drafters whose answers are overdue, so that no step waits for them."""
        links = self._forest.links
        if self._policy.drafts and (num_marked := links.mark_silent(rows, now_s)):
            report.count("paceline:fallbacks", "drafter_silent", by=num_marked)
            self._num_unmet += num_marked

    def waits(self, rows: Ints, now_s: float) -> Floats:
        """By session the seconds until its next nodes, `[sessions]`; NaN: never.

        A trial waits for no drafter before it responds, and a plain step for none: they cost what plain ones do.
        """
        return self._forest.links.waits(rows, now_s) if self._policy.awaits else np.full(len(rows), np.nan)

    def pays(self, rows: Ints, draft_s: float, *, idle_s: float) -> bool:
        """Whether a draft step of `draft_s` seconds a level for all sessions is worth waiting for."""
        waits = np.where(self._standing(rows).drafted & self._forest.links.may_wait(rows), draft_s, np.nan)
        return self.worth_waiting(rows, waits, idle_s=idle_s) > 0.0

    def show_lag(self, rows: Ints, report: StepReport) -> None:
        """Shows the most committed tokens of a session that its drafter has not answered; none while drafters idle."""
        report.levels["paceline:drafter_lag_tokens"] = self._forest.links.lag_tokens(rows)

    def worth_waiting(self, rows: Ints, waits: Floats, *, idle_s: float) -> float:
        """Seconds for which the next nodes are worth waiting for, at most a step in all.

        Args:
            rows: Rows of the decoding sessions.
            waits: See `waits`.
            idle_s: For how long the engine has been waiting.
        """
        left_s = self.step_s - idle_s
        never = np.isnan(waits)
        if left_s <= LEAST_WAIT_S or never.all():
            return 0.0
        at = self._standing(rows)
        prices = np.where(never, 1.0, at.prices)
        expected, gains = self._forest.expected_gains(rows, at.caps, prices, at.shares, at.chains)
        gainful = waits[~never & (gains != 0.0)]
        if not len(gainful) or not self._policy.waits(expected, gains, wait_s=float(gainful.min()), step_s=self.step_s):
            return 0.0
        return min(float(gainful.max()), left_s)
