"""Which nodes a step verifies, and the price of one more: a policy over the trees of all sessions.

With nodes sorted by survival `s_1 >= s_2 >= ...`, `B` roots and a step that takes `T(rows)` seconds, the nodes worth
verifying are `best_prefix(B, s, T)` (`paceline.core.goodput`), and

    price = goodput(m*) * (T(B + m*) - T(B + m* - 1)).

A guess of a session with a long context may take longer than others: it counts as `w` rows, survivals are sorted by
`s / w`, and the session's price is `w * price`.

Whether drafters work, or sources inside the verifier alone, is measured (`paceline.core.drafting_mode`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.core.drafting_mode import MAX_EAGER_BATCH, DraftingMode, Mode
from paceline.core.goodput import LEAST_SURVIVAL, MovingAverage, best_prefix, is_worth
from paceline.core.step_time import DEFAULT_STEP_COST, MOST_ROWS, Floats, StepCost, StepTimes
from paceline.core.target_events import Reason
from paceline.forest import Bools, Ints, Picked

# In what is learned.
REHEARSED = "rehearsed"
# Highest price of a verifier that drafts, in tokens: at 1 drafters would idle.
MOST_PRICE = 1.0 - LEAST_SURVIVAL
# Rows of prompts over a step's others up to which the rest of its time, without theirs, is known well enough. Under
# load nearly every step reads a few rows of some prompt: when none of them counted, 64 sessions lost 7 % to their first
# trial.
MOST_PROMPT = 0.25
# Seconds of a step before one was planned.
FIRST_STEP_S = 0.01


class Goodput:
    """The set of nodes that maximises expected committed tokens per second, by step times learned on the way.

    Args:
        cost: Step times by their rows, or the shape of these, of any scale.
        max_nodes: Most nodes a session may have verified in one step.
        max_eager_batch: Sessions up to which drafting is tried as soon as plain steps are known; infinite where
            drafters have hardware of their own, so that a trial takes nothing from the verifier.

    Attributes:
        times: Step times of modes that were seen.
        mode: Origin of drafts: drafters and sources inside the verifier, these alone, or none.
        least_survival: Least survival worth one more row in the last step, for sources inside the verifier.
        step_s: Expected seconds of the step that `allocate` was for.
        responded: Whether the time of that step shows what its mode is worth.
        rehearsed: The draft model with which a rehearsal has shown the rates of both modes at all loads; empty: none.
    """

    def __init__(
        self, cost: StepCost = DEFAULT_STEP_COST, *, max_nodes: int = 16, max_eager_batch: float = MAX_EAGER_BATCH
    ) -> None:
        self.max_nodes = max_nodes
        self._max_eager_batch = max_eager_batch
        self.mode = DraftingMode(max_eager_batch)
        self.start_from(cost)

    def start_from(self, cost: StepCost) -> None:
        """Begins with the step times of a profile."""
        self._cost = cost
        self.forget()

    def forget(self) -> None:
        """Begins anew: what was learned has proved to be unusable."""
        rehearsing = self.mode.rehearsing
        self.mode = DraftingMode(self._max_eager_batch)
        self.mode.rehearsing = rehearsing
        self.times = StepTimes(self._cost)
        self.least_survival, self.rehearsed = 0.0, ""
        self.step_s, self.responded = FIRST_STEP_S, True
        self._price: MovingAverage | None = None
        # Of a guess in the step that `allocate` was for.
        self._mean_weight = 1.0

    @property
    def price(self) -> float:
        """Least survival worth drafting for, that of the last guess which usually pays; 1: drafters idle."""
        if not self.drafts:
            return 1.0
        return 0.0 if self._price is None else min(MOST_PRICE, self._price.value)

    def weights(self, lens: Ints) -> Floats:
        """Rows that a guess of each session counts as, by its committed tokens `[sessions]`; 1 on average."""
        return self._cost.weights(lens)

    def prices(self, weights: Floats) -> Floats:
        """The price for each session."""
        return np.minimum(self.price * weights, MOST_PRICE)

    @property
    def drafts(self) -> bool:
        """Whether drafters work for the step that `enter` announced."""
        return self.mode.mode is Mode.DRAFTING

    @property
    def guesses(self) -> bool:
        """Whether that step verifies guesses, of drafters or of sources alone; if not, nothing of speculation runs."""
        return self.drafts or self.mode.mode is not Mode.PLAIN

    @property
    def awaits(self) -> bool:
        """Whether a step may wait for drafters: they work for it and, in a trial, have responded."""
        return self.drafts and (self.responded or not self.mode.is_trying)

    @property
    def reason(self) -> Reason:
        """Why that step verifies guesses, or does not."""
        return self.mode.reason

    @property
    def measured(self) -> list[tuple[str, int, float]]:
        """Mode, about how many sessions, and tokens a second of all of them, as measured at the present load."""
        num_sessions, rates = self.mode.measured
        return [(mode, num_sessions, num_sessions * rate / self._cost.at(num_sessions)) for mode, rate in rates.items()]

    def rehearse(self, drafts: bool | None, *, over: str = "") -> None:
        """Steps are of one mode from now on, see `DraftingMode.rehearse`; they teach their times as usual.

        Args:
            drafts: Whether they draft; None: as pays.
            over: As in `SetMode`.
        """
        self.mode.rehearse(None if drafts is None else Mode.DRAFTING if drafts else Mode.PLAIN)
        self.rehearsed = over or self.rehearsed

    def learned(self) -> dict[str, Any]:
        """State that a successor may begin with: step times, rates, and the draft model they were rehearsed with."""
        return {"step_times": {**self.times.factors}, "mode_rates": self.mode.learned(), REHEARSED: self.rehearsed}

    def resume(self, learned: Mapping[str, Any]) -> None:
        """Begins where a predecessor ended; called after `start_from`.

        Raises:
            KeyError, TypeError, ValueError: It is not the output of `learned`.
        """
        times = StepTimes(self._cost, {Mode(mode): factors for mode, factors in learned["step_times"].items()})
        self.mode.resume(learned["mode_rates"])
        self.times, self.rehearsed = times, str(learned[REHEARSED])

    def enter(self, num_sessions: int, *, drafters: bool = True, sources: bool = False) -> bool:
        """Announces a step over so many sessions, those included whose prompts are read; returns whether it drafts.

        Args:
            drafters: Whether some of them have a drafter.
            sources: Whether sources inside the verifier may guess for some.
        """
        possible = [mode for mode, able in zip(Mode, (True, sources, drafters), strict=True) if able]
        drafts = self.mode.enter(num_sessions, possible) is Mode.DRAFTING
        if not drafts:
            self._price, self.responded = None, True
        return drafts

    def allocate(self, picked: Picked, *, weights: Floats, responded: Bools | None = None, other_rows: int = 0) -> Ints:
        """Picks the nodes of highest goodput, for a step that verifies guesses.

        Args:
            picked: The best nodes of each session that decodes, within its cap and `max_nodes`.
            weights: See `weights`, `[sessions]`.
            responded: bool `[n]`, of the sessions that have a drafter: whether it has responded since it was called, so
                that the tree is what it brings. None: there are none.
            other_rows: Rows of the step that are taken (prefill).

        Returns:
            How many of its best nodes each session verifies, int32 `[sessions]`.
        """
        num_sessions, most = picked.survivals.shape
        worth = (picked.survivals / weights[:, None]).ravel()
        # Beside a prompt a row must be worth as much as in other steps: it delays the first token.
        least = LEAST_SURVIVAL if self._price is None or not other_rows else self._price.value
        best = np.argsort(-worth, kind="stable")[: np.count_nonzero(worth >= least)]
        # Prefill gives way to guesses within the step's bound, so only roots count beside them.
        best = best[: max(0, MOST_ROWS - num_sessions)]
        count = 0
        if num_sessions:
            # At least one guess is priced: the price of a first one.
            ends = np.concatenate(([0.0], np.cumsum(weights[best // most]) if len(best) else [1.0]))
            seconds = self._seconds(num_sessions + other_rows, ends)
            count, rate = best_prefix(num_sessions, picked.survivals.ravel()[best], seconds[: len(best) + 1])
            self._mean_weight = float(ends[count]) / count if count else 1.0
            self._expect(float(seconds[count]), other_rows)
            # The price of the last guess, not the next: where times bend, the next row may cost ten times as much, and
            # sessions that hold less than usual have not come to it.
            last = max(1, count)
            more_s, rows = (float(each[last] - each[last - 1]) for each in (seconds, ends))
            self._set_prices(rate * more_s / rows, has_prefill=other_rows > 0)
        self.responded = responded is None or bool(2 * responded.sum() >= len(responded))
        return np.bincount(best[:count] // max(1, most), minlength=num_sessions).astype(np.int32)

    def _seconds(self, rows: int, guesses: Floats) -> Floats:
        """Seconds of steps of `rows` rows and so many guesses, which need not be whole."""
        seconds = self.times.with_guesses(self.mode.mode, rows, math.ceil(guesses[-1]))
        return np.asarray(np.interp(guesses, np.arange(len(seconds)), seconds))

    def _expect(self, seconds: float, other_rows: int) -> None:
        # Before the first step a shape says nothing of seconds, and a prompt's step is no usual one.
        if self.times.factors and not other_rows:
            self.step_s = seconds

    def _set_prices(self, price: float, *, has_prefill: bool) -> None:
        self.least_survival = price = max(LEAST_SURVIVAL, price)
        if self._price is None:
            self._price = MovingAverage(price)
        elif not has_prefill:
            self._price.add(price)

    def observe(
        self, *, roots: int, guesses: int, tokens: int, step_s: float, cycle_s: float, other_rows: int = 0
    ) -> None:
        """Learns the time of a step, and the rate of its mode.

        Args:
            roots: Sessions that decoded.
            guesses: Their guesses that it verified.
            tokens: Committed by these sessions.
            step_s: Seconds of the step itself.
            cycle_s: From the end of the step before it: waiting and events cost time, too.
            other_rows: Its rows of prompts; a step with many teaches neither.
        """
        rows, base_s = roots + guesses, self._cost.at
        has_prefill = other_rows > MOST_PROMPT * rows
        without_prompts = base_s(rows) / base_s(rows + other_rows)
        if not has_prefill:
            weight = self._mean_weight * guesses
            self.times.observe(self.mode.mode, roots=roots, guesses=weight, seconds=without_prompts * step_s)
        self.mode.observe(
            num_sessions=roots,
            tokens=tokens,
            time=(cycle_s - (1.0 - without_prompts) * step_s) / base_s(roots),
            has_prefill=has_prefill,
            responded=self.responded,
        )

    def most_rows(self, num_sessions: int) -> int:
        """The most rows of a step over so many sessions, prompts apart."""
        return max(num_sessions, min(MOST_ROWS, num_sessions * (1 + self.max_nodes)))

    def plain_s(self, rows: int) -> float:
        """Expected seconds of a step of so many rows without prompts."""
        return float(self.times.with_guesses(self.mode.mode, rows, 0)[0]) if rows else 0.0

    def waits(self, expected: Floats, gains: Floats, *, wait_s: float, step_s: float) -> bool:
        """Whether a step of `step_s` seconds should wait `wait_s` for the next nodes: the same objective.

        Args:
            expected: Tokens of each session in a step now, `[sessions]`.
            gains: Expected tokens of the next nodes, `[sessions]`.
        """
        return is_worth(float(gains.sum()), float(expected.sum()), cost_s=wait_s, step_s=step_s)


class FixedGamma(Goodput):
    """Always the `gamma` best nodes of every session, whatever the load; for comparison and tests."""

    def __init__(self, *, gamma: int) -> None:
        super().__init__(max_nodes=gamma)

    @property
    def drafts(self) -> bool:
        """Always, unless gamma is 0."""
        return self.max_nodes > 0

    @property
    def reason(self) -> Reason:
        """The setting."""
        return Reason.FIXED

    def most_rows(self, num_sessions: int) -> int:
        """All nodes of all sessions."""
        return num_sessions * (1 + self.max_nodes)

    def enter(self, num_sessions: int, *, drafters: bool = True, sources: bool = False) -> bool:
        """Drafts wherever a session may speculate."""
        works = self.drafts and (drafters or sources)
        return self.mode.enter(num_sessions, [Mode.DRAFTING if works else Mode.PLAIN]) is Mode.DRAFTING

    def allocate(self, picked: Picked, *, weights: Floats, responded: Bools | None = None, other_rows: int = 0) -> Ints:
        """Picks the `gamma` best nodes of every session."""
        counts: Ints = (picked.survivals[:, : self.max_nodes] > 0.0).sum(axis=1, dtype=np.int32)
        self._expect(float(self.times.with_guesses(self.mode.mode, len(counts), int(counts.sum()))[-1]), other_rows)
        return counts

    def waits(self, expected: Floats, gains: Floats, *, wait_s: float, step_s: float) -> bool:
        """Waits until every session has its nodes, or they are overdue."""
        return bool(gains.any())
