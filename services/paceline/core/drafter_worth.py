"""What drafters are worth to a verifier at the load of now, and the price that they are told.

Drafters work ahead of the step that uses their nodes, so the price looks ahead as well: it is that of the nodes which
sessions usually have in hand. A price of 1 lets drafters rest, and steps cost what they cost without them. Sources
inside the verifier do not rest; their guesses are there in plain steps too, and what drafters bring is measured against
steps with these.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from paceline.core.demand import Demand
from paceline.core.drafting_switch import Drafting, DraftingSwitch
from paceline.core.goodput import Best, Floats, best_prefix, num_tried
from paceline.core.step_time import MOST_ROWS, StepCost, StepMode, StepTimes
from paceline.core.survivals import SessionSurvivals, UsualSurvivals, first_survivals

# Nodes less likely than this are left out even where kernels compute their rows anyway.
LEAST_SURVIVAL = 0.05
# Of drafters at work; 1 would send them to rest.
MOST_PRICE = 0.99
# Weight of a step in what steps are usually like: their rows of prompts, for one that reads a prompt says little about
# those that follow, the share of drafters that have answered, and what a choice among trees is worth.
SMOOTHING = 0.05


class DrafterWorth:
    """Expected goodput with drafters at work and without them.

    Args:
        max_nodes: Most nodes a session may have verified in one step.

    Attributes:
        price: Of drafters at work.
        switch: Says which ones are.
    """

    def __init__(self, max_nodes: int) -> None:
        self.price = 0.0
        self.switch = DraftingSwitch()
        # While drafters work, and without them.
        self.in_hand = UsualSurvivals(first_survivals(max_nodes))
        self.own = UsualSurvivals(np.zeros(max_nodes))
        # Share of the drafters at work that have answered: the others read prompts, and that takes time, too.
        self._answered = 1.0
        # Gain of steps over that of what sessions usually have: at any time some have more, and get the rows.
        self._choice = 1.0
        self._prefill_rows = 0.0

    def work_for(self, demand: Demand) -> bool:
        """Whether a session's drafter is at work."""
        drafting = self.switch.drafting
        return demand.is_drafted and (drafting is Drafting.ALL or (drafting is Drafting.SOME and demand.usual.tries))

    def look(
        self,
        demands: Sequence[Demand],
        held: Sequence[Sequence[float]],
        times: StepTimes,
        *,
        rate: float,
        other_rows: int,
        joining: Sequence[bool],
    ) -> None:
        """Takes in a step, and decides who drafts from now on and for which price.

        Args:
            demands: The sessions that decode in it.
            held: Survivals of the nodes that each has, best first.
            times: Of steps.
            rate: Goodput of the step.
            other_rows: Rows of prompts in it.
            joining: See `DraftPolicy.allocate`.
        """
        self._prefill_rows += SMOOTHING * (other_rows - self._prefill_rows)
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

    def _remember(self, demands: Sequence[Demand], held: Sequence[Sequence[float]]) -> None:
        """Sessions whose drafters rest are taken to be like the others."""
        drafted = [(each, survivals) for each, survivals in zip(demands, held, strict=True) if each.is_drafted]
        working = [(each, survivals) for each, survivals in drafted if self.work_for(each)]
        answered = [(each, survivals) for each, survivals in working if each.answered]
        if working:
            self._answered += SMOOTHING * (len(answered) / len(working) - self._answered)
        self.own.see([each.usual.own for each, _ in drafted], [each.own[: each.cap] for each, _ in drafted])
        self.in_hand.see([each.usual.in_hand for each, _ in answered], [survivals for _, survivals in answered])
        self.in_hand.forget([each.usual.in_hand for each, _ in drafted if not self.work_for(each)])

    def _judge(
        self, drafted: Sequence[SessionSurvivals], num_sessions: int, times: StepTimes, gain_now: float | None
    ) -> None:
        """For the steps to come, of so many sessions, some of them drafted for."""
        rows, room = num_sessions + round(self._prefill_rows), max(0, MOST_ROWS - num_sessions)
        in_hand = self.in_hand.of_all([each.in_hand for each in drafted], round(len(drafted) * self._answered))[:room]
        own = self.own.of_all([each.own for each in drafted], len(drafted))[:room]
        plain, drafting = times.table(StepMode.PLAIN), times.table(StepMode.DRAFTING)
        without = best_nodes(plain, num_sessions, rows, own)
        with_drafters = best_nodes(drafting, num_sessions, rows, in_hand)
        gain = with_drafters.rate / without.rate
        if gain_now is not None and self.switch.drafting is Drafting.ALL:
            self._choice += SMOOTHING * (gain_now / gain - self._choice)
        self.switch.judge(
            self._choice * gain,
            most_gain=best_nodes(drafting, num_sessions, rows, np.ones_like(in_hand)).rate / without.rate,
            slowdown=drafting.at(rows) / plain.at(rows),
            num_sessions=num_sessions,
        )
        # What is tried is drafted for as if it were worth verifying.
        tried = self.switch.drafting is Drafting.SOME
        worth = price_of_last(without, plain, rows) if tried else price_of_last(with_drafters, drafting, rows)
        self.price = min(MOST_PRICE, worth)


def best_nodes(table: StepCost, num_sessions: int, rows: int, survivals: Sequence[float] | Floats) -> Best:
    """How many of the guesses, best first, a step of so many rows besides verifies, and its goodput."""
    if not len(survivals):
        # In most steps of drafters at rest, and arrays of one element take a hundredth of a small model's step.
        return Best(0, num_sessions / table.at(rows))
    return best_prefix(num_sessions, survivals, table.with_guesses(rows, len(survivals)))


def price_of_last(best: Best, table: StepCost, rows: int) -> float:
    """What the last of the best nodes costs in tokens: what is less likely is not worth a row.

    The last, not the next: where times bend, the next row may cost ten times as much, and sessions that have less in
    hand than usual have not come to it.
    """
    return max(LEAST_SURVIVAL, best.rate * table.slope(rows + max(1, best.count) - 1))


def _own_rate(demands: Sequence[Demand], times: StepTimes) -> float:
    """Goodput that a step would have had without drafters."""
    own = sorted((survival for each in demands for survival in each.own[: each.cap]), reverse=True)
    return best_nodes(times.table(StepMode.PLAIN), len(demands), len(demands), own).rate
