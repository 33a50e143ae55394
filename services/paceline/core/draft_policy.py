"""Which nodes a step verifies, and the price of one more: a policy over the trees of all sessions.

With nodes sorted by survival `s_1 >= s_2 >= ...`, `B` roots and a step that takes `T(rows)` seconds, the nodes worth
verifying are `best_prefix(B, s, T)` (`paceline.core.goodput`), and

    price = goodput(m*) * (T(B + m*) - T(B + m* - 1)).

Whether a verifier drafts at all: `paceline.core.drafting_mode`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.core.drafting_mode import DraftingMode, Mode
from paceline.core.goodput import LEAST_SURVIVAL, Best, MovingAverage, best_prefix, is_worth
from paceline.core.step_profile import StepProfile, Take, step_profile_from
from paceline.core.step_time import DEFAULT_STEP_COST, MOST_ROWS, Floats, StepCost, StepTimes
from paceline.forest import Bools, Ints, Picked

# Seconds that a guess is taken to cost besides its row: it is requested, judged, and moved or dropped.
NODE_S = 5e-5
# Rows of prompts over a step's others up to which what they take can be left out of its time.
MOST_PROMPT = 0.25
# Highest price of a verifier that drafts, in tokens: at 1 drafters would idle.
MOST_PRICE = 0.99


class Goodput:
    """The set of nodes that maximises expected committed tokens per second, by step times learned on the way.

    Args:
        cost: Of steps, by their rows.
        max_nodes: Most nodes a session may have verified in one step.
        tried_up_to: Sessions up to which drafting is taken to be worth it before anything is known; infinite where
            drafters have hardware of their own, so that nothing is taken from the verifier.

    Attributes:
        times: Of steps that draft.
        mode: Whether steps draft.
        least_survival: Least survival worth one more row in the last step, for sources inside the verifier.
        take: What a rehearsal sees at present, whatever would pay; None: there is none.
    """

    def __init__(
        self, cost: StepCost = DEFAULT_STEP_COST, *, max_nodes: int = 16, tried_up_to: float = math.inf
    ) -> None:
        self.max_nodes = max_nodes
        self.least_survival = 0.0
        self.take: Take | None = None
        self._tried_up_to = tried_up_to
        self._price: MovingAverage | None = None
        self._answered = True
        self.start_from(cost)

    @property
    def price(self) -> float:
        """Least survival worth drafting for, that of the last guess which usually pays; 1: drafters idle."""
        if not self.drafts:
            return 1.0
        return 0.0 if self._price is None else min(MOST_PRICE, self._price.value)

    @property
    def drafts(self) -> bool:
        """Whether the step that `enter` announced drafts; if not, nothing of speculation runs."""
        return self.mode.mode is Mode.DRAFTING if self.take is None else self.take.drafts

    def start_from(self, cost: StepCost, *, plain: StepCost | None = None) -> None:
        """Begins anew from the times of steps without sessions.

        Args:
            cost: By rows, while drafters work.
            plain: While they idle; None: the same.
        """
        self._cost = replace(cost, node_s=cost.node_s or NODE_S)
        self.use(StepProfile.assumed(plain or cost, self._cost, self._tried_up_to), rehearsed=False)

    def use(self, profile: StepProfile, *, rehearsed: bool = True) -> None:
        """Begins anew from what a rehearsal has found, unless it is what is known already."""
        if not rehearsed or profile != self.mode.profile:
            self._begin(StepTimes(), DraftingMode(profile, rehearsed=rehearsed))

    def _begin(self, times: StepTimes, mode: DraftingMode) -> None:
        self.times, self.mode = times, mode
        # By sessions what `StepProfile.over` gives.
        self._over: dict[int, tuple[Floats, Floats]] = {}

    def learned(self) -> dict[str, Any]:
        """What a successor may begin with: factors on step times and on what each load promises, and the profile."""
        profile = self.mode.profile.learned() if self.mode.rehearsed else None
        return {"step_times": self.times.learned(), "loads": self.mode.learned(), "profile": profile}

    def resume(self, learned: Mapping[str, Any]) -> None:
        """Begins where a predecessor ended; called after `start_from`.

        Raises:
            ConfigError, KeyError, TypeError, ValueError: It is not what such a policy learns.
        """
        kept = learned["profile"]
        profile = self.mode.profile if kept is None else step_profile_from(kept)
        times, mode = StepTimes(), DraftingMode(profile, rehearsed=kept is not None)
        times.resume(learned["step_times"])
        mode.resume(learned["loads"])
        self._begin(times, mode)

    def enter(self, num_sessions: int) -> bool:
        """Announces a step over so many sessions, those included whose prompts are read; returns whether it drafts.

        Args:
            num_sessions: How many; 0 where none of them may speculate.
        """
        if self.take is None:
            self.mode.enter(num_sessions)
        drafts = num_sessions > 0 and self.drafts
        if not drafts:
            self._price, self._answered = None, True
        return drafts

    def allocate(self, picked: Picked, *, answered: Bools | None = None, other_rows: int = 0) -> Ints:
        """Picks the nodes of highest goodput, for a step that drafts.

        Args:
            picked: The best nodes of each session that decodes, within its cap and `max_nodes`.
            answered: bool `[n]`, of the sessions that have a drafter: whether it has answered since it was called, so
                that the tree is what it brings. None: there are none.
            other_rows: Rows of the step that are taken (prefill).

        Returns:
            How many of its best nodes each session verifies, int32 `[sessions]`.
        """
        num_sessions = len(picked.survivals)
        held = np.where(picked.survivals >= LEAST_SURVIVAL, picked.survivals, 0.0)
        # Prefill gives way to guesses within the step's bound, so only roots count beside them.
        ranked = np.sort(held[held > 0.0])[::-1][: max(0, MOST_ROWS - num_sessions)]
        count = 0
        if num_sessions:
            seconds = self.times.seconds(self._table(num_sessions, len(ranked), other_rows))
            best = best_prefix(num_sessions, ranked, seconds)
            self._set_prices(self._price_of(best, num_sessions, other_rows), reads=other_rows > 0)
            count = best.count
        self._answered = answered is None or bool(2 * answered.sum() >= len(answered))
        if self.take is not None:
            return best_each(held[:, : self.take.gamma], held.size)
        return best_each(held, count)

    def _table(self, num_sessions: int, most: int, other_rows: int = 0) -> Floats:
        """What the profile says of steps with 0 to `most` guesses, `[most + 1]`: its points, and kernels' own steps."""
        return self._cost.with_guesses(num_sessions + other_rows, most) * self._over_cost(num_sessions, most)

    def _over_cost(self, num_sessions: int, most: int) -> Floats:
        """The profile's seconds over those of steps of as many rows and no sessions, `[most + 1]`."""
        known = self._over.get(num_sessions)
        if known is None:
            known = self._over[num_sessions] = self.mode.profile.over(self._cost, num_sessions)
        return np.interp(np.arange(most + 1) / num_sessions, *known)

    def _price_of(self, best: Best, num_sessions: int, other_rows: int) -> float:
        """What the last of the best guesses costs in tokens: what is less likely is not worth a row.

        The last, not the next: where times bend, the next row may cost ten times as much, and sessions that have less
        in hand than usual have not come to it.
        """
        last = max(1, best.count) - 1
        slope = self._cost.slope(num_sessions + other_rows + last) * self._over_cost(num_sessions, last)[last]
        return max(LEAST_SURVIVAL, best.rate * self.times.guess * float(slope))

    def _set_prices(self, price: float, *, reads: bool) -> None:
        self.least_survival = price
        if self._price is None:
            self._price = MovingAverage(price)
        elif not reads:
            self._price.add(price)

    def observe(self, *, roots: int, guesses: int, tokens: int, seconds: float, other_rows: int = 0) -> None:
        """Learns the time of a step that drafts, and what the mode is worth.

        Args:
            roots: Sessions that decoded.
            guesses: Of theirs that it verified.
            tokens: What these sessions committed.
            seconds: From the end of the step before it.
            other_rows: Its rows of prompts; a step with some does not teach the former, nor with many the latter.
        """
        if self.take is not None:
            if not other_rows and self._answered:
                self.take.add(guesses=guesses, tokens=tokens, seconds=seconds)
            return
        if self.drafts and not other_rows and roots + guesses <= MOST_ROWS:
            table = self._table(roots, guesses)
            self.times.observe(roots_s=float(table[0]), guesses_s=float(table[-1] - table[0]), seconds=seconds)
        rows = roots + guesses
        reads = other_rows > MOST_PROMPT * rows
        if other_rows and not reads:
            # Under load, nearly every step reads a few rows of some prompt.
            seconds *= self._cost.at(rows) / self._cost.at(rows + other_rows)
        self.mode.observe(num_sessions=roots, tokens=tokens, seconds=seconds, reads=reads, answered=self._answered)

    def waits(self, expected: Floats, gains: Floats, *, wait_s: float, step_s: float) -> bool:
        """Whether a step of `step_s` seconds should wait `wait_s` for the next nodes: the same objective.

        Args:
            expected: Tokens of each session in a step now, `[sessions]`.
            gains: What the next nodes would add, `[sessions]`.
        """
        return is_worth(float(gains.sum()), float(expected.sum()), cost_s=wait_s, step_s=step_s)


class FixedGamma(Goodput):
    """Always the `gamma` best nodes of every session, whatever the load; for comparison and tests."""

    def __init__(self, *, gamma: int) -> None:
        super().__init__(max_nodes=gamma)

    @property
    def price(self) -> float:
        """0: every node is worth drafting, unless gamma is 0."""
        return 0.0 if self.drafts else 1.0

    @property
    def drafts(self) -> bool:
        """Always, unless gamma is 0."""
        return self.max_nodes > 0

    def enter(self, num_sessions: int) -> bool:
        """Drafts wherever a session may speculate."""
        return num_sessions > 0 and self.drafts

    def allocate(self, picked: Picked, *, answered: Bools | None = None, other_rows: int = 0) -> Ints:
        """Picks the `gamma` best nodes of every session."""
        return best_each(picked.survivals[:, : self.max_nodes], picked.survivals.size)

    def observe(self, *, roots: int, guesses: int, tokens: int, seconds: float, other_rows: int = 0) -> None:
        """Learns nothing."""

    def waits(self, expected: Floats, gains: Floats, *, wait_s: float, step_s: float) -> bool:
        """Waits until every session has its nodes, or they are overdue."""
        return bool(gains.any())


def best_each(survivals: Floats, count: int) -> Ints:
    """How many of its best nodes each session gets when `count` of all are taken, of equals those that come first.

    Args:
        survivals: Of the nodes of each session, best first, `[sessions, most]`; those that are not taken become 0.
        count: Most nodes of all sessions.
    """
    flat = survivals[survivals > 0.0]
    if count < len(flat):
        least = np.partition(flat, len(flat) - count)[len(flat) - count] if count else np.inf
        ties = survivals == least
        left = count - int((survivals > least).sum())
        survivals[(survivals < least) | (ties & (np.cumsum(ties).reshape(ties.shape) > left))] = 0.0
    counts: Ints = (survivals > 0.0).sum(axis=1, dtype=np.int32)
    return counts
