"""Which nodes a step verifies, and the price of one more: policies over the trees of all sessions.

With nodes sorted by survival `s_1 >= s_2 >= ...`, `B` roots and a step that takes `T(rows)` seconds, the nodes worth
verifying are `best_prefix(B, s, T)` (`paceline.core.goodput`), and

    price = goodput(m*) * (T(B + m*) - T(B + m* - 1)).

Speculation off is the fixed point under load (m* = 0), not a special case.
The price that goes out to drafters looks ahead (`paceline.core.drafter_worth`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.core.drafter_worth import LEAST_SURVIVAL, Demand, DrafterWorth, Steps
from paceline.core.drafting_switch import Drafting
from paceline.core.goodput import Floats, best_prefix, is_worth
from paceline.core.step_time import DEFAULT_STEP_COST, MOST_ROWS, StepCost, StepMode, StepTimes
from paceline.forest import Ints, Picked


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a step verifies, and the prices that drafters receive with its commits.

    Args:
        counts: int32 `[sessions]`, how many of its best nodes each one verifies.
        prices: Of each session.
        price: Of sessions whose prompts are read.
    """

    counts: Ints
    prices: tuple[float, ...]
    price: float


class DraftPolicy(Protocol):
    """Policy that picks the nodes of a step."""

    @property
    def max_nodes(self) -> int:
        """Most nodes that any session may have verified in one step."""
        ...

    @property
    def price(self) -> float:
        """Least survival worth drafting for, of a session that begins; 1: its drafter idles."""
        ...

    @property
    def least_survival(self) -> float:
        """Least survival worth one more row in the last step, for sources whose guesses cost nothing but that."""
        ...

    def start_from(self, plain: StepCost, drafting: StepCost, *, doubt: float = 1.0) -> None:
        """Takes profiles of plain steps, and of steps with the threads that are left while drafters work."""
        ...

    def learned(self) -> dict[str, list[float]]:
        """What a successor may begin with."""
        ...

    def resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        """Begins where a predecessor ended; called after `start_from`.

        Raises:
            KeyError, ValueError: It is not what such a policy learns.
        """
        ...

    def allocate(
        self, demands: Sequence[Demand], picked: Picked, *, other_rows: int = 0, joining: Sequence[bool] = ()
    ) -> Allocation:
        """Picks nodes for every session.

        Args:
            demands: The sessions that decode.
            picked: The best nodes of each, within its cap and `max_nodes`.
            other_rows: Rows of the step that are taken (prefill).
            joining: For each session whose prompt is being read, whether its drafter's guesses would be of use; these
                sessions decode in the steps that the price is for.
        """
        ...

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """Learns the time of a step; arguments as in `StepTimes.observe`."""
        ...

    def waits(self, expected: Floats, gains: Floats, *, wait_s: float, step_s: float) -> bool:
        """True when the step should wait `wait_s` seconds for the next nodes rather than run now in `step_s`.

        Args:
            expected: Tokens of each session in a step now, `[sessions]`.
            gains: What the next nodes would add, `[sessions]`.
            wait_s: See above.
            step_s: See above.
        """
        ...

    def num_asked(
        self, gains: Sequence[float], *, expected: float, step_s: float, call_s: Callable[[int], float]
    ) -> int:
        """For how many sessions, those of most gain first, a source that takes time is called.

        Args:
            gains: Tokens that the source would add, of each session, best first.
            expected: Tokens of the whole step without it.
            step_s: Time of a step without it.
            call_s: From a number of sessions to the seconds of one call for all of them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedGamma:
    """Always the `gamma` best nodes of every session, whatever the load; for comparison and tests."""

    gamma: int

    @property
    def max_nodes(self) -> int:
        """Gamma."""
        return self.gamma

    @property
    def price(self) -> float:
        """0: every node is worth drafting, unless gamma is 0."""
        return 0.0 if self.gamma else 1.0

    @property
    def least_survival(self) -> float:
        """The price."""
        return self.price

    def start_from(self, plain: StepCost, drafting: StepCost, *, doubt: float = 1.0) -> None:
        """Ignores profiles."""

    def learned(self) -> dict[str, list[float]]:
        """Nothing."""
        return {}

    def resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        """Takes nothing over."""

    def allocate(
        self, demands: Sequence[Demand], picked: Picked, *, other_rows: int = 0, joining: Sequence[bool] = ()
    ) -> Allocation:
        """Picks the `gamma` best nodes of every session."""
        del other_rows, joining
        counts = np.minimum((picked.survivals > 0.0).sum(axis=1, dtype=np.int32), np.int32(self.gamma))
        return Allocation(counts=counts, prices=(self.price,) * len(demands), price=self.price)

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """Learns nothing."""

    def waits(self, expected: Floats, gains: Floats, *, wait_s: float, step_s: float) -> bool:
        """Waits until every session has its nodes, or they are overdue."""
        del expected, wait_s, step_s
        return bool(gains.any())

    def num_asked(
        self, gains: Sequence[float], *, expected: float, step_s: float, call_s: Callable[[int], float]
    ) -> int:
        """All of them."""
        del expected, step_s, call_s
        return len(gains)


class Goodput:
    """The set of nodes that maximises expected committed tokens per second, by step times learned on the way.

    Args:
        times: Of steps, by their rows and by whether drafters work.
        max_nodes: Most nodes a session may have verified in one step.
    """

    def __init__(self, times: StepTimes | None = None, *, max_nodes: int = 16) -> None:
        self.times = StepTimes(DEFAULT_STEP_COST) if times is None else times
        self.max_nodes = max_nodes
        self.least_survival = 0.0
        self.drafters = DrafterWorth(max_nodes)

    @property
    def price(self) -> float:
        """That of drafters at work, while all are; otherwise 1."""
        return self.drafters.price if self.drafters.switch.drafting is Drafting.ALL else 1.0

    def start_from(self, plain: StepCost, drafting: StepCost, *, doubt: float = 1.0) -> None:
        """Begins a new table of step times from profiles."""
        self.times = StepTimes(plain, drafting, doubt=doubt)

    def learned(self) -> dict[str, list[float]]:
        """Step times, usual survivals, and the loads that were compared."""
        in_hand, own = self.drafters.in_hand.learned(), self.drafters.own.learned()
        compared = sorted(map(float, self.drafters.switch.compared))
        return {"step_times": self.times.learned(), "in_hand": in_hand, "own": own, "compared": compared}

    def resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        """Begins where a predecessor ended."""
        self.times.resume(learned["step_times"])
        self.drafters.in_hand.resume(learned["in_hand"])
        self.drafters.own.resume(learned["own"])
        self.drafters.switch.compared = set(map(int, learned["compared"]))

    def allocate(
        self, demands: Sequence[Demand], picked: Picked, *, other_rows: int = 0, joining: Sequence[bool] = ()
    ) -> Allocation:
        """Picks the nodes of highest goodput, and decides who drafts from now on."""
        held = np.where(picked.survivals >= LEAST_SURVIVAL, picked.survivals, 0.0)
        # Prefill gives way to guesses within the step's bound, so only roots count beside them.
        best_each(held, max(0, MOST_ROWS - len(demands)))
        table = self.times.table(StepMode.DRAFTING if any(map(self.drafters.work_for, demands)) else StepMode.PLAIN)
        step = Steps(table, len(demands), prefill_rows=other_rows)
        best = step.best(np.sort(held[held > 0.0])[::-1])
        self.least_survival = step.price(best)
        counts = best_each(held.copy(), best.count)
        self.drafters.look(demands, held, self.times, rate=best.rate, other_rows=other_rows, joining=joining)
        prices = tuple(self.drafters.price if self.drafters.work_for(each) else 1.0 for each in demands)
        return Allocation(counts=counts, prices=prices, price=self.price)

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """Learns the time of a step."""
        self.times.observe(rows=rows, guesses=guesses, mode=mode, seconds=seconds, mixed=mixed)
        self.drafters.switch.observe(seconds)

    def waits(self, expected: Floats, gains: Floats, *, wait_s: float, step_s: float) -> bool:
        """Applies the same objective to the time of waiting."""
        return is_worth(float(gains.sum()), float(expected.sum()), cost_s=wait_s, step_s=step_s)

    def num_asked(
        self, gains: Sequence[float], *, expected: float, step_s: float, call_s: Callable[[int], float]
    ) -> int:
        """Applies the same objective to the time of a call."""
        seconds = [step_s, *(step_s + call_s(count) for count in range(1, len(gains) + 1))]
        return best_prefix(expected, gains, seconds).count


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
