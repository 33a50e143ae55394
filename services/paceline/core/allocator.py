"""Which nodes a step verifies, and the price of one more: policies over the trees of all sessions.

With nodes sorted by survival `s_1 >= s_2 >= ...`, `B` roots and a step that takes `T(rows)` seconds,

    goodput(m) = (B + s_1 + ... + s_m) / T(B + m),   m* = argmax over all m,
    price = goodput(m*) * (T(B + m*) - T(B + m* - 1)).

Speculation off is the fixed point under load (m* = 0), not a special case. See DSpark (2607.05147) and TETRIS
(2502.15197) for the same allocation inside one box.

Drafters work ahead of the step that uses their nodes, so the price that goes out looks ahead as well: it is that of
the nodes which sessions usually have in hand, at the load of now. When even these do not beat plain decoding, the
price is 1: drafters rest, and steps cost what they cost without them. Sources inside the verifier do not rest; their
guesses are there in plain steps too, and what drafters bring is measured against steps with these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

import numpy as np

from paceline.core.holdings import Floats, Holdings, Usual, first_holdings
from paceline.core.mixture import num_worth_asking
from paceline.core.patience import Prospect, worth_waiting
from paceline.core.shifts import Shifts
from paceline.core.step_cost import DEFAULT_STEP_COST, MOST_ROWS, StepCost, StepMode, StepTimes
from paceline.core.tree import DraftTree, Node, best_first

# Nodes less likely than this are left out even where kernels compute their rows anyway.
LEAST_SURVIVAL = 0.05
# Of drafters at work; 1 would send them to rest.
MOST_PRICE = 0.99
# Weight of a step in the usual number of prefill rows: one that reads a prompt says little about those that follow.
OTHERS_SMOOTHING = 0.05
# Standard deviations by which steps with drafters at work are looked upon kindly while they rest.
KINDNESS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One decoding session as the allocator sees it.

    Args:
        tree: Its guesses.
        cap: Most nodes it may have verified.
        drafted: Whether a drafter is there for it.
        answered: Whether that drafter has answered since it was called to work, so that the tree is what it brings.
        own: Survivals of guesses that it has without a drafter, best first.
        holdings: What it usually has in hand; the allocator keeps it up.
    """

    tree: DraftTree
    cap: int
    drafted: bool = True
    answered: bool = True
    own: Sequence[float] = ()
    holdings: Holdings = field(default_factory=Holdings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Nodes to verify, one tuple a session (parents before children), and the price that goes out with the commits."""

    nodes: tuple[tuple[Node, ...], ...]
    price: float


class Allocator(Protocol):
    """Policy that picks the nodes of a step."""

    @property
    def max_nodes(self) -> int:
        """Most nodes that any session may have verified in one step."""
        ...

    @property
    def price(self) -> float:
        """Least survival worth drafting for; 1: drafters rest."""
        ...

    @property
    def least_survival(self) -> float:
        """Least survival worth one more row in the last step, for sources whose guesses cost nothing but that."""
        ...

    def start_from(self, plain: StepCost, drafting: StepCost) -> None:
        """Takes profiles of plain steps and of steps with the threads left while drafters work."""
        ...

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: int = 0) -> Allocation:
        """Picks nodes for every session.

        Args:
            demands: The sessions that decode.
            other_rows: Rows of the step that are spoken for (prefill).
            joining: Sessions whose prompts are being read, and that decode in the steps the price is for.
        """
        ...

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """Learns what a step took; see `StepTimes.observe`."""
        ...

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """True when the step should wait `wait_s` seconds for the next nodes rather than run now in `step_s`."""
        ...

    def num_asked(
        self, gains: Sequence[float], *, expected: float, step_s: float, call_s: Callable[[int], float]
    ) -> int:
        """For how many sessions, those of most gain first, a source that takes time is asked; see `core.mixture`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedGamma:
    """Always the `gamma` best nodes of every session, whatever the load; for comparison and tests."""

    gamma: int

    @property
    def max_nodes(self) -> int:
        """See `Allocator`."""
        return self.gamma

    @property
    def price(self) -> float:
        """See `Allocator`; 0 unless gamma is."""
        return 0.0 if self.gamma else 1.0

    @property
    def least_survival(self) -> float:
        """See `Allocator`."""
        return self.price

    def start_from(self, plain: StepCost, drafting: StepCost) -> None:
        """See `Allocator`; of no use here."""

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: int = 0) -> Allocation:
        """See `Allocator`."""
        del other_rows, joining
        chosen = tuple(tuple(best_first(each.tree, min(self.gamma, each.cap))) for each in demands)
        return Allocation(nodes=chosen, price=self.price)

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """See `Allocator`; nothing to learn."""

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """See `Allocator`; waits until every session has its nodes, or they are overdue."""
        del wait_s, step_s
        return any(each.gain for each in prospects)

    def num_asked(
        self, gains: Sequence[float], *, expected: float, step_s: float, call_s: Callable[[int], float]
    ) -> int:
        """See `Allocator`; all of them."""
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
        self.price = 0.0
        self.least_survival = 0.0
        # While drafters work, and without them.
        self._in_hand = Usual(first_holdings(max_nodes))
        self._own = Usual(np.zeros(max_nodes))
        self._shifts = Shifts()
        # Rows of prefill in a step, usually.
        self._other_rows = 0.0

    def start_from(self, plain: StepCost, drafting: StepCost) -> None:
        """See `Allocator`."""
        self.times = StepTimes(plain, drafting)

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: int = 0) -> Allocation:
        """See `Allocator`."""
        self._other_rows += OTHERS_SMOOTHING * (other_rows - self._other_rows)
        rows = len(demands) + other_rows
        # Prefill gives way to guesses within the step's bound, so only roots count beside them.
        ranked = self._ranked(demands)[: max(0, MOST_ROWS - len(demands))]
        drafted = [index for index, each in enumerate(demands) if each.cap and each.drafted]
        table = self.times.table(self._mode if drafted else StepMode.PLAIN)
        best, goodput = _best(table, len(demands), rows, [survival for survival, _, _ in ranked])
        self.least_survival = _price(goodput, table, rows, best)
        chosen: list[list[Node]] = [[] for _ in demands]
        for _, index, node in ranked[:best]:
            chosen[index].append(node)
        answered = any(demands[index].answered for index in drafted)
        if drafted and self._shifts.is_due(len(demands) + joining, answered=answered):
            self._look(ranked, demands, drafted)
            self._set_price([demands[index].holdings for index in drafted], len(demands), joining)
        return Allocation(nodes=tuple(map(tuple, chosen)), price=self.price)

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """See `Allocator`."""
        self.times.observe(rows=rows, guesses=guesses, mode=mode, seconds=seconds, mixed=mixed)

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """See `Allocator`; the same objective, applied to time."""
        return worth_waiting(prospects, wait_s=wait_s, step_s=step_s)

    def num_asked(
        self, gains: Sequence[float], *, expected: float, step_s: float, call_s: Callable[[int], float]
    ) -> int:
        """See `Allocator`; the same objective, applied to the time of a call."""
        return num_worth_asking(gains, expected=expected, step_s=step_s, call_s=call_s)

    @property
    def _mode(self) -> StepMode:
        return StepMode.PLAIN if self._shifts.resting else StepMode.DRAFTING

    def _ranked(self, demands: Sequence[Demand]) -> list[tuple[float, int, Node]]:
        ranked = [
            (survival, index, node)
            for index, each in enumerate(demands)
            if each.cap and each.tree.root.children
            for node in best_first(each.tree, min(self.max_nodes, each.cap))
            if (survival := each.tree.survival(node)) >= LEAST_SURVIVAL
        ]
        # Of equals those that came first stay first, so parents before children.
        ranked.sort(key=itemgetter(0), reverse=True)
        return ranked

    def _look(
        self, ranked: Sequence[tuple[float, int, Node]], demands: Sequence[Demand], drafted: Sequence[int]
    ) -> None:
        """Remembers what sessions of drafters have in hand; what those at rest would bring is slowly forgotten."""
        holdings = [demands[index].holdings for index in drafted]
        own = self._own.of([each.own for each in holdings])
        own = self._own.see(own, [demands[index].own[: demands[index].cap] for index in drafted])
        in_hand = self._in_hand.of([each.in_hand for each in holdings])
        if self._mode is StepMode.PLAIN:
            in_hand = self._in_hand.forget(in_hand)
        else:
            survivals: dict[int, list[float]] = {index: [] for index in drafted}
            for survival, index, _ in ranked:
                # Sessions without a drafter have nodes too: of look-up, or left over from a drafter that is gone.
                if index in survivals:
                    survivals[index].append(survival)
            answered = [place for place, index in enumerate(drafted) if demands[index].answered]
            looks = [survivals[drafted[place]] for place in answered]
            in_hand[answered] = self._in_hand.see(in_hand[answered], looks)
        for each, its_own, its_in_hand in zip(holdings, own, in_hand, strict=True):
            each.own, each.in_hand = its_own, its_in_hand

    def _set_price(self, drafted: Sequence[Holdings], num_decoding: int, joining: int) -> None:
        """For the steps to come: sessions that join will be like those that decode, and some steps read prompts."""
        num_sessions = num_decoding + joining
        num_drafted = round(len(drafted) * num_sessions / num_decoding)
        rows = num_sessions + round(self._other_rows)
        kindness = KINDNESS if self._shifts.resting else 0.0
        table = self.times.table(StepMode.DRAFTING, kindness=kindness)
        room = max(0, MOST_ROWS - num_sessions)
        in_hand = _typical([each.in_hand for each in drafted], num_drafted)[:room]
        own = _typical([each.own for each in drafted], num_drafted)[:room]
        goodputs = _goodputs(table, num_sessions, rows, in_hand)
        without = _goodputs(self.times.table(StepMode.PLAIN), num_sessions, rows, own)
        best = int(np.argmax(goodputs))
        self._shifts.judge(float(goodputs[best] / without.max()) if best else 0.0, num_sessions)
        worth = _price(float(goodputs[best]), table, rows, best)
        self.price = 1.0 if self._shifts.resting else min(MOST_PRICE, worth)


def _best(table: StepCost, num_sessions: int, rows: int, survivals: Sequence[float]) -> tuple[int, float]:
    """How many of the guesses, best first, a step verifies, and its goodput."""
    if not survivals:
        # In most steps of drafters at rest, and arrays of one element take a hundredth of a small model's step.
        return 0, num_sessions / table.at(rows)
    goodputs = _goodputs(table, num_sessions, rows, np.array(survivals))
    best = int(np.argmax(goodputs))
    return best, float(goodputs[best])


def _price(goodput: float, table: StepCost, rows: int, num_nodes: int) -> float:
    """What the last of so many nodes costs in tokens: what is less likely is not worth a row.

    The last, not the next: where times bend, the next row may cost ten times as much, and sessions that have less in
    hand than usual have not come to it.
    """
    return max(LEAST_SURVIVAL, goodput * table.slope(rows + max(1, num_nodes) - 1))


def _typical(holdings: Sequence[Floats | None], num_sessions: int) -> Floats:
    """What so many sessions have in hand, best first, `[nodes]`.

    The mean of a rank stands for all: of single records the best would be those that err most.
    """
    known = np.array([each for each in holdings if each is not None])
    return np.repeat(known.sum(axis=0) / len(known), num_sessions) if len(known) else np.empty(0)


def _goodputs(table: StepCost, num_sessions: int, rows: int, survivals: Floats) -> Floats:
    """Expected tokens/s of a step that verifies the first 0, 1, ... of the guesses, `[guesses + 1]`."""
    tokens = num_sessions + np.concatenate(([0.0], np.cumsum(survivals)))
    return np.asarray(tokens / table.with_guesses(rows, len(survivals)))
