"""Which nodes a step verifies, and the price of one more: a policy over the trees of all sessions.

With nodes sorted by survival `s_1 >= s_2 >= ...`, `B` roots and a step that takes `T(rows)` seconds, the nodes worth
verifying are `best_prefix(B, s, T)` (`paceline.core.goodput`), and

    price = goodput(m*) * (T(B + m*) - T(B + m* - 1)).

Whether a verifier drafts at all is measured (`paceline.core.drafting_mode`), and while drafters idle, whether the
sources inside the verifier guess.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.core.drafting_mode import MOST_LOST, MOST_ON_LOAN, DraftingMode, Mode
from paceline.core.goodput import LEAST_SURVIVAL, MovingAverage, Steps, is_worth
from paceline.core.step_time import DEFAULT_STEP_COST, MOST_ROWS, Floats, StepCost, StepTimes
from paceline.core.target_events import Reason
from paceline.forest import Bools, Ints, Picked

# In what is learned.
REHEARSED = "rehearsed"
# Highest price of a verifier that drafts, in tokens: at 1 drafters would idle.
MOST_PRICE = 0.99
# Rows of prompts over a step's others up to which what is left of its time, once theirs is taken out, is known well
# enough. Under load nearly every step reads a few rows of some prompt: when none of them counted, 64 sessions lost 7 %
# to their first trial.
MOST_PROMPT = 0.25


class Goodput:
    """The set of nodes that maximises expected committed tokens per second, by step times learned on the way.

    Args:
        cost: Of steps, by their rows.
        max_nodes: Most nodes a session may have verified in one step.
        most_on_loan: Sessions up to which drafting is tried as soon as plain steps are known; infinite where drafters
            have hardware of their own, so that a trial takes nothing from the verifier.

    Attributes:
        times: Of steps while drafters work.
        mode: Whether drafters work, and sources with them.
        inside: Whether sources inside the verifier guess while drafters idle.
        least_survival: Least survival worth one more row in the last step, for sources inside the verifier.
        answered: Whether the time of the step that `allocate` was for shows what its mode is worth.
        rehearsed: The draft model with which a rehearsal has shown what both modes are worth at all loads; empty: none.
    """

    def __init__(
        self, cost: StepCost = DEFAULT_STEP_COST, *, max_nodes: int = 16, most_on_loan: float = MOST_ON_LOAN
    ) -> None:
        self.max_nodes = max_nodes
        self.least_survival = 0.0
        self._most_on_loan = most_on_loan
        self.answered = True
        self.start_from(cost)
        self._know_nothing()

    def _know_nothing(self) -> None:
        self.mode = DraftingMode(self._most_on_loan)
        # A trial of these takes nothing but the rows of its guesses: it is begun at any load, and shows soon enough.
        self.inside = DraftingMode(math.inf, most_lost=MOST_LOST / 2)
        self._price: MovingAverage | None = None
        self._between_s = MovingAverage(0.0)
        self.rehearsed = ""

    def forget(self) -> None:
        """Begins anew with the step times of the profile: what was learned since has proved to be unusable."""
        rehearsing = self.mode.rehearsing
        self._know_nothing()
        self.mode.rehearsing = rehearsing
        self.start_from(self._cost, plain=self._plain, doubt=self._doubt)

    @property
    def price(self) -> float:
        """Least survival worth drafting for, that of the last guess which usually pays; 1: drafters idle."""
        if not self.drafts:
            return 1.0
        return 0.0 if self._price is None else min(MOST_PRICE, self._price.value)

    @property
    def drafts(self) -> bool:
        """Whether drafters work for the step that `enter` announced."""
        return self.mode.mode is Mode.DRAFTING

    @property
    def guesses(self) -> bool:
        """Whether that step verifies guesses, of drafters or of sources alone; if not, nothing of speculation runs."""
        return self.drafts or self.inside.mode is Mode.DRAFTING

    @property
    def reason(self) -> Reason:
        """Why that step verifies guesses, or does not."""
        why = self.mode.reason
        return why if self.drafts or not (self.guesses or why is Reason.NO_DRAFTER) else self.inside.reason

    def rehearse(self, drafts: bool | None, *, over: str = "") -> None:
        """Steps are of one mode from now on, see `DraftingMode.rehearse`; they teach their times as usual.

        Args:
            drafts: Whether they draft; None: as pays.
            over: As in `Rehearse`.
        """
        self.mode.rehearse(None if drafts is None else Mode.DRAFTING if drafts else Mode.PLAIN)
        self.rehearsed = over or self.rehearsed

    def start_from(
        self,
        cost: StepCost,
        *,
        plain: StepCost | None = None,
        doubt: float = 1.0,
        steps: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Begins anew with the step times of a profile.

        Args:
            cost: By rows, while drafters work.
            plain: While they idle; None: the same.
            doubt: How many times as far off as a measured profile it may be.
            steps: Rows and seconds of steps without guesses that were seen since.
        """
        self._cost, self._plain, self._doubt = cost, plain or cost, doubt
        # Of steps while drafters idle: on shared cores they are faster.
        self.times, self._idle_times = StepTimes(cost, doubt=doubt), StepTimes(self._plain, doubt=doubt)
        for rows, seconds in steps:
            for times in (self.times, self._idle_times):
                times.observe(roots=rows, guesses=0, seconds=seconds)

    def learned(self) -> dict[str, list[Any]]:
        """What a successor may begin with: step times, the rates of both modes, and with whom these were rehearsed."""
        return {
            "step_times": self.times.learned(),
            "rates": self.mode.learned(),
            "inside": self.inside.learned(),
            REHEARSED: [self.rehearsed],
        }

    def resume(self, learned: Mapping[str, Sequence[Any]]) -> None:
        """Begins where a predecessor ended; called after `start_from`.

        Raises:
            KeyError, ValueError: It is not what such a policy learns.
        """
        self.times.resume(learned["step_times"])
        self.mode.resume(learned["rates"])
        self.inside.resume(learned["inside"])
        (self.rehearsed,) = map(str, learned[REHEARSED])

    def enter(self, num_sessions: int, *, drafters: bool = True, sources: bool = False) -> bool:
        """Announces a step over so many sessions, those included whose prompts are read; returns whether it drafts.

        Args:
            drafters: Whether some of them have a drafter.
            sources: Whether sources inside the verifier may guess for some.
        """
        drafts = self.mode.enter(num_sessions if drafters else 0) is Mode.DRAFTING
        alone = sources and not drafts and self.mode.rehearsing is None
        self.inside.enter(num_sessions if alone else 0)
        if not drafts:
            self._price, self.answered = None, True
        return drafts

    def allocate(self, picked: Picked, *, answered: Bools | None = None, other_rows: int = 0) -> Ints:
        """Picks the nodes of highest goodput, for a step that verifies guesses.

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
            step = Steps(self._times_now, num_sessions, other_rows, self._between_s.value)
            best = step.best(ranked)
            self._set_prices(step.price(best), reads=other_rows > 0)
            count = best.count
        self.answered = answered is None or bool(2 * answered.sum() >= len(answered))
        return best_each(held, count)

    @property
    def _times_now(self) -> StepTimes:
        return self.times if self.drafts else self._idle_times

    def _set_prices(self, price: float, *, reads: bool) -> None:
        self.least_survival = price
        if self._price is None:
            self._price = MovingAverage(price)
        elif not reads:
            self._price.add(price)

    def observe(
        self, *, roots: int, guesses: int, tokens: int, step_s: float, cycle_s: float, other_rows: int = 0
    ) -> None:
        """Learns the time of a step that verifies guesses, and what its mode is worth.

        Args:
            roots: Sessions that decoded.
            guesses: Of theirs that it verified.
            tokens: What these sessions committed.
            step_s: Seconds of the step itself.
            cycle_s: From the end of the step before it: waiting and events cost time, too.
            other_rows: Its rows of prompts; a step with many teaches neither.
        """
        rows = roots + guesses
        reads = other_rows > MOST_PROMPT * rows
        without_prompts = self._plain.at(rows) / self._plain.at(rows + other_rows)
        if self.guesses and not reads:
            self._times_now.observe(roots=roots, guesses=guesses, seconds=without_prompts * step_s)
            self._between_s.add(cycle_s - step_s)
        for mode in (self.mode, self.inside):
            mode.observe(
                num_sessions=roots,
                tokens=tokens,
                seconds=cycle_s - (1.0 - without_prompts) * step_s,
                plain_s=self._plain.at(roots),
                reads=reads,
                answered=self.answered,
            )

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

    @property
    def reason(self) -> Reason:
        """The setting."""
        return Reason.FIXED

    def enter(self, num_sessions: int, *, drafters: bool = True, sources: bool = False) -> bool:
        """Drafts wherever a session may speculate."""
        return num_sessions > 0 and (drafters or sources) and self.drafts

    def allocate(self, picked: Picked, *, answered: Bools | None = None, other_rows: int = 0) -> Ints:
        """Picks the `gamma` best nodes of every session."""
        return best_each(picked.survivals[:, : self.max_nodes], picked.survivals.size)

    def observe(
        self, *, roots: int, guesses: int, tokens: int, step_s: float, cycle_s: float, other_rows: int = 0
    ) -> None:
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
