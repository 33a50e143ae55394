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
from operator import itemgetter
from typing import Protocol

from paceline.core.drafter_worth import LEAST_SURVIVAL, Demand, DrafterWorth, Steps
from paceline.core.drafting_switch import Drafting
from paceline.core.goodput import best_prefix, is_worth
from paceline.core.step_time import DEFAULT_STEP_COST, MOST_ROWS, StepCost, StepMode, StepTimes
from paceline.core.tree import Node, best_nodes
from paceline.core.wait_for_drafts import Prospect


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a step verifies, and the prices that drafters receive with its commits.

    Args:
        nodes: One tuple a session, parents before children.
        prices: Of each session.
        price: Of sessions whose prompts are read.
    """

    nodes: tuple[tuple[Node, ...], ...]
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

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: Sequence[bool] = ()) -> Allocation:
        """Picks nodes for every session.

        Args:
            demands: The sessions that decode.
            other_rows: Rows of the step that are taken (prefill).
            joining: For each session whose prompt is being read, whether its drafter's guesses would be of use; these
                sessions decode in the steps that the price is for.
        """
        ...

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """Learns the time of a step; arguments as in `StepTimes.observe`."""
        ...

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """True when the step should wait `wait_s` seconds for the next nodes rather than run now in `step_s`."""
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

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: Sequence[bool] = ()) -> Allocation:
        """Picks the `gamma` best nodes of every session."""
        del other_rows, joining
        chosen = tuple(tuple(best_nodes(each.tree, min(self.gamma, each.cap), chain=each.chain)) for each in demands)
        return Allocation(nodes=chosen, prices=(self.price,) * len(demands), price=self.price)

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """Learns nothing."""

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """Waits until every session has its nodes, or they are overdue."""
        del wait_s, step_s
        return any(each.gain for each in prospects)

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

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: Sequence[bool] = ()) -> Allocation:
        """Picks the nodes of highest goodput, and decides who drafts from now on."""
        # Prefill gives way to guesses within the step's bound, so only roots count beside them.
        ranked = self._ranked(demands)[: max(0, MOST_ROWS - len(demands))]
        table = self.times.table(StepMode.DRAFTING if any(map(self.drafters.work_for, demands)) else StepMode.PLAIN)
        step = Steps(table, len(demands), prefill_rows=other_rows)
        best = step.best([survival for survival, _, _ in ranked])
        self.least_survival = step.price(best)
        chosen: list[list[Node]] = [[] for _ in demands]
        for _, index, node in ranked[: best.count]:
            chosen[index].append(node)
        held: list[list[float]] = [[] for _ in demands]
        for survival, index, _ in ranked:
            held[index].append(survival)
        self.drafters.look(demands, held, self.times, rate=best.rate, other_rows=other_rows, joining=joining)
        prices = tuple(self.drafters.price if self.drafters.work_for(each) else 1.0 for each in demands)
        return Allocation(nodes=tuple(map(tuple, chosen)), prices=prices, price=self.price)

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """Learns the time of a step."""
        self.times.observe(rows=rows, guesses=guesses, mode=mode, seconds=seconds, mixed=mixed)
        self.drafters.switch.observe(seconds)

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """Applies the same objective to the time of waiting."""
        gain, expected = sum(each.gain for each in prospects), sum(each.expected for each in prospects)
        return is_worth(gain, expected, cost_s=wait_s, step_s=step_s)

    def num_asked(
        self, gains: Sequence[float], *, expected: float, step_s: float, call_s: Callable[[int], float]
    ) -> int:
        """Applies the same objective to the time of a call."""
        seconds = [step_s, *(step_s + call_s(count) for count in range(1, len(gains) + 1))]
        return best_prefix(expected, gains, seconds).count

    def _ranked(self, demands: Sequence[Demand]) -> list[tuple[float, int, Node]]:
        ranked = [
            (survival, index, node)
            for index, each in enumerate(demands)
            if each.cap and each.tree.root.children
            for node in best_nodes(each.tree, min(self.max_nodes, each.cap), chain=each.chain)
            if (survival := each.tree.survival(node)) >= LEAST_SURVIVAL
        ]
        # Of equals those that came first stay first, so parents before children.
        ranked.sort(key=itemgetter(0), reverse=True)
        return ranked
