"""What drafters are worth to a verifier at the present load, and the price that they receive.

Drafters work ahead of the step that uses their nodes, so the price looks ahead as well: it is that of the nodes which
sessions usually have in hand. A price of 1 lets drafters idle, and steps cost what they cost without them. Sources
inside the verifier do not idle: their guesses are there in plain steps too, and what drafters bring is measured against
steps with these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeVar

import numpy as np

from paceline.core.drafting_switch import Drafting, DraftingSwitch
from paceline.core.goodput import Best, Floats, best_prefix, num_tried
from paceline.core.moving_average import MovingAverage
from paceline.core.step_time import MOST_ROWS, StepCost, StepMode, StepTimes
from paceline.core.survivals import SessionSurvivals, UsualSurvivals, first_survivals

Numbers = TypeVar("Numbers", float, Floats)

# Nodes less likely than this are left out even where kernels compute their rows anyway.
LEAST_SURVIVAL = 0.05
# Of drafters at work; 1 would make them idle.
MOST_PRICE = 0.99
# Weight of a step in what steps are usually like: whether they read prompts, and how many rows of them, the share of
# drafters that have answered, and what a choice among trees is worth.
SMOOTHING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One decoding session, as the policies see it.

    Args:
        cap: Most nodes it may have verified.
        drafted: Whether a drafter is there for it.
        answered: Whether that drafter has answered since it was called to work, so that the tree is what it brings.
        own: Survivals of guesses that it has without a drafter, best first.
        num_unread: Tokens that its drafter would read before it could draft.
        usual: What it usually has in hand; the policy keeps it up.
    """

    cap: int
    drafted: bool = True
    answered: bool = True
    own: Sequence[float] = ()
    num_unread: int = 0
    usual: SessionSurvivals = field(default_factory=SessionSurvivals)

    @property
    def is_drafted(self) -> bool:
        """Whether its drafter's guesses would be of use."""
        return self.drafted and self.cap > 0


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps over `num_sessions` sessions, some of which read prompts besides.

    Args:
        table: Their times.
        num_sessions: Roots in each.
        reading: Share of the steps that read prompts.
        prefill_rows: Rows of prompts in those.
    """

    table: StepCost
    num_sessions: int
    reading: float = 1.0
    prefill_rows: int = 0

    @property
    def seconds(self) -> float:
        """Time of a step without guesses."""
        return self._mean(self.table.at)

    def best(self, survivals: Sequence[float] | Floats) -> Best:
        """How many of the guesses, best first, are worth verifying, and the goodput of a step with them."""
        if not len(survivals):
            # The usual case while drafters idle; arrays of one element would take a hundredth of a small model's step.
            return Best(0, self.num_sessions / self.seconds)
        seconds = self._mean(lambda rows: self.table.with_guesses(rows, len(survivals)))
        return best_prefix(self.num_sessions, survivals, seconds)

    def price(self, best: Best) -> float:
        """What the last of the best guesses costs in tokens: what is less likely is not worth a row.

        The last, not the next: where times bend, the next row may cost ten times as much, and sessions that have less
        in hand than usual have not come to it.
        """
        last = max(1, best.count) - 1
        return max(LEAST_SURVIVAL, best.rate * self._mean(lambda rows: self.table.slope(rows + last)))

    def _mean(self, of_rows: Callable[[int], Numbers]) -> Numbers:
        """Of steps that read prompts and of those that do not: their mean rows would belong to no step at all."""
        reads = of_rows(self.num_sessions + self.prefill_rows)
        if self.reading == 1.0:
            return reads
        decodes = of_rows(self.num_sessions)
        return decodes + self.reading * (reads - decodes) if self.reading else decodes


class DrafterWorth:
    """Expected goodput with drafters at work and without them.

    Args:
        max_nodes: Most nodes a session may have verified in one step.

    Attributes:
        price: Of drafters at work.
        switch: Decides which ones are.
    """

    def __init__(self, max_nodes: int) -> None:
        self.price = 0.0
        self.switch = DraftingSwitch()
        # While drafters work, and without them.
        self.in_hand = UsualSurvivals(first_survivals(max_nodes))
        self.own = UsualSurvivals(np.zeros(max_nodes))
        # Share of the drafters at work that have answered: the others read prompts, and that takes time, too.
        self._answered = MovingAverage(1.0, SMOOTHING)
        # Gain of steps over that of what sessions usually have: at any time some have more, and get the rows.
        self._choice = MovingAverage(1.0, SMOOTHING)
        # Share of the steps that read prompts, and their rows of these.
        self._reading, self._prefill_rows = MovingAverage(0.0, SMOOTHING), MovingAverage(0.0, SMOOTHING)

    def work_for(self, demand: Demand) -> bool:
        """Whether a session's drafter is at work."""
        drafting = self.switch.drafting
        return demand.is_drafted and (drafting is Drafting.ALL or (drafting is Drafting.SOME and demand.usual.tries))

    def look(
        self,
        demands: Sequence[Demand],
        held: Floats,
        times: StepTimes,
        *,
        rate: float,
        other_rows: int,
        joining: Sequence[bool],
    ) -> None:
        """Takes in a step, and decides who drafts from now on and at which price.

        Args:
            demands: The sessions that decode in it.
            held: Survivals of the nodes that each has, best first, `[demands, most]`, 0 behind the last.
            times: Of steps.
            rate: Goodput of the step.
            other_rows: Rows of prompts in it.
            joining: See `DraftPolicy.allocate`.
        """
        self._reading.add(other_rows > 0)
        if other_rows:
            self._prefill_rows.value = self._prefill_rows.value or other_rows
            self._prefill_rows.add(other_rows)
        drafted = [each for each in demands if each.is_drafted]
        num_sessions = len(demands) + len(joining)
        answered = any(each.answered for each in drafted)
        if (drafted or any(joining)) and self.switch.is_due(num_sessions, answered=answered):
            self._remember(demands, held)
            usual = [*(each.usual for each in drafted), *(SessionSurvivals() for joins in joining if joins)]
            self._judge(usual, num_sessions, times, None if other_rows else rate / _own_rate(demands, times))
        self._choose_who_tries(drafted)

    def _choose_who_tries(self, drafted: Sequence[Demand]) -> None:
        """While some sessions try their drafters, those that have the least to read at first."""
        if self.switch.drafting is not Drafting.SOME:
            for each in drafted:
                each.usual.tries = False
        elif drafted and not any(each.usual.tries for each in drafted):
            for each in sorted(drafted, key=attrgetter("num_unread"))[: num_tried(len(drafted))]:
                each.usual.tries = True

    def _remember(self, demands: Sequence[Demand], held: Floats) -> None:
        """Takes in what sessions have in hand; those whose drafters idle are taken to be like the others."""
        drafted = [(each, survivals) for each, survivals in zip(demands, held, strict=True) if each.is_drafted]
        working = [(each, survivals) for each, survivals in drafted if self.work_for(each)]
        answered = [(each, survivals) for each, survivals in working if each.answered]
        if working:
            self._answered.add(len(answered) / len(working))
        self.own.see([each.usual.own for each, _ in drafted], [each.own[: each.cap] for each, _ in drafted])
        self.in_hand.see([each.usual.in_hand for each, _ in answered], [survivals for _, survivals in answered])
        self.in_hand.forget([each.usual.in_hand for each, _ in drafted if not self.work_for(each)])

    def _judge(
        self, drafted: Sequence[SessionSurvivals], num_sessions: int, times: StepTimes, gain_now: float | None
    ) -> None:
        """Judges the steps to come, of `num_sessions` sessions, some of which have drafters."""
        room = max(0, MOST_ROWS - num_sessions)
        num_answered = round(len(drafted) * self._answered.value)
        in_hand = self.in_hand.of_all([each.in_hand for each in drafted], num_answered)[:room]
        sure = np.ones(min(room, len(drafted) * len(self.in_hand.typical)))
        own = self.own.of_all([each.own for each in drafted], len(drafted))[:room]
        plain, drafting = (self._usual_steps(times.table(mode), num_sessions) for mode in StepMode)
        without, with_drafters = plain.best(own), drafting.best(in_hand)
        gain = with_drafters.rate / without.rate
        if gain_now is not None and self.switch.drafting is Drafting.ALL:
            self._choice.add(gain_now / gain)
        self.switch.judge(
            self._choice.value * gain,
            most_gain=drafting.best(sure).rate / without.rate,
            plain_s=plain.seconds,
            drafting_s=drafting.seconds,
            num_sessions=num_sessions,
        )
        # What is tried is drafted for as if it were worth verifying.
        tried = self.switch.drafting is Drafting.SOME
        self.price = min(MOST_PRICE, plain.price(without) if tried else drafting.price(with_drafters))

    def _usual_steps(self, table: StepCost, num_sessions: int) -> Steps:
        share = self._reading.value if self._reading.value > SMOOTHING else 0.0
        return Steps(table, num_sessions, share, round(self._prefill_rows.value))


def _own_rate(demands: Sequence[Demand], times: StepTimes) -> float:
    """Goodput that a step would have had without drafters."""
    own = sorted((survival for each in demands for survival in each.own[: each.cap]), reverse=True)
    return Steps(times.table(StepMode.PLAIN), len(demands)).best(own).rate
