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
from paceline.core.step_cost import DEFAULT_STEP_COST, StepCost, StepMode, StepTimes
from paceline.core.tree import DraftTree, Node, best_first

# Nodes less likely than this are left out even where kernels compute their rows anyway.
LEAST_SURVIVAL = 0.05
# Of drafters at work; 1 would send them to rest.
MOST_PRICE = 0.99
# Drafters that rest are called back for a gain of this much, and not before so many steps; they are sent to rest for
# none at all, and not before so many, or a few for a clear loss: the first steps after a call have no drafts yet.
WORTH_A_CALL, CLEAR_LOSS = 1.03, 0.95
LEAST_REST, LEAST_WORK, LEAST_TRIAL = 4, 12, 6
# Drafters that were called back in vain rest so many times as long the next time at such a load, up to so many steps:
# where plain steps have the drafters' CPUs as well, a call in vain costs several of them. Loads are alike within a
# factor of two: what a busy hour taught is not forgotten in a quiet minute. A gain far beyond what calls are made for
# ends any rest: the text that look-up served well has ended, and another one began.
REST_GROWTH, MOST_REST, WORTH_A_CALL_AT_ONCE = 4, 2048, 1.5
# A machine that got slow and drafters that slow it down look alike until drafters rest: so they do, as a control,
# after so many steps.
CONTROL_EVERY = 250
# What sessions have in hand is learned over many steps, and looked at in every so many: to look, and to set the price
# by it, is half of what the controller costs a step.
LOOK_EVERY = 4
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

    def allocate(self, demands: Sequence[Demand], *, other_rows: int) -> Allocation:
        """Picks nodes for every session; `other_rows` rows of the step are spoken for (prefill)."""
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

    def allocate(self, demands: Sequence[Demand], *, other_rows: int) -> Allocation:
        """See `Allocator`."""
        del other_rows
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
        # The first step looks.
        self._steps_since_change = LEAST_WORK - 1
        # By load (digits of the number of sessions in base 2), how long drafters rest before they are called back.
        self._rests: dict[int, int] = {}

    def start_from(self, plain: StepCost, drafting: StepCost) -> None:
        """See `Allocator`."""
        self.times = StepTimes(plain, drafting)

    def allocate(self, demands: Sequence[Demand], *, other_rows: int) -> Allocation:
        """See `Allocator`."""
        ranked = self._ranked(demands)
        rows = len(demands) + other_rows
        drafted = [index for index, each in enumerate(demands) if each.cap and each.drafted]
        table = self.times.table(self._mode if drafted else StepMode.PLAIN)
        best, goodput = _best(table, len(demands), rows, [survival for survival, _, _ in ranked])
        self.least_survival = _price(goodput, table, rows, best)
        chosen: list[list[Node]] = [[] for _ in demands]
        for _, index, node in ranked[:best]:
            chosen[index].append(node)
        # Until drafters that were called have read what they were not told, there is nothing to judge them by.
        if drafted and (self._mode is StepMode.PLAIN or any(demands[index].answered for index in drafted)):
            self._steps_since_change += 1
            if self._steps_since_change % LOOK_EVERY == 0:
                self._look(ranked, demands, drafted)
                self._set_price(len(demands), [demands[index].holdings for index in drafted], rows)
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
        return StepMode.PLAIN if self.price >= 1.0 else StepMode.DRAFTING

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

    def _set_price(self, num_sessions: int, drafted: Sequence[Holdings], rows: int) -> None:
        resting = self._mode is StepMode.PLAIN
        load = num_sessions.bit_length()
        rest = self._rests.get(load, LEAST_REST)
        table = self.times.table(StepMode.DRAFTING, kindness=KINDNESS if resting else 0.0)
        goodputs = _outlook(table, num_sessions, rows, [each.in_hand for each in drafted])
        without = _outlook(self.times.table(StepMode.PLAIN), num_sessions, rows, [each.own for each in drafted])
        best = int(np.argmax(goodputs))
        gain = float(goodputs[best] / without.max()) if best else 0.0
        brief = self._steps_since_change <= 2 * LEAST_WORK
        if self._is_worth_a_call(gain, rest) if resting else self._is_worth_a_rest(gain):
            if not resting and gain <= 1.0 and brief:
                self._rests[load] = min(REST_GROWTH * rest, MOST_REST)
            self._steps_since_change = 0
            resting = not resting
        elif not resting and gain > 1.0 and not brief:
            self._rests.pop(load, None)
        self.price = 1.0 if resting else min(MOST_PRICE, _price(float(goodputs[best]), table, rows, best))

    def _is_worth_a_call(self, gain: float, rest: int) -> bool:
        """Whether drafters at rest, so many steps where nothing else is known, are called back for such a gain."""
        return gain > (WORTH_A_CALL if self._steps_since_change >= rest else WORTH_A_CALL_AT_ONCE)

    def _is_worth_a_rest(self, gain: float) -> bool:
        """Whether drafters at work that bring such a gain are sent to rest."""
        if self._steps_since_change >= CONTROL_EVERY:
            return True
        least = LEAST_TRIAL if gain <= CLEAR_LOSS else LEAST_WORK
        return gain <= 1.0 and self._steps_since_change >= least


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


def _outlook(table: StepCost, num_sessions: int, rows: int, holdings: Sequence[Floats | None]) -> Floats:
    """Goodput of steps that verify the first 0, 1, ... of what sessions usually have, tokens/s `[nodes + 1]`.

    The mean of a rank stands for all: of single records the best would be those that err most.
    """
    known = np.array([each for each in holdings if each is not None])
    survivals = np.repeat(known.sum(axis=0) / len(known), len(known)) if len(known) else np.empty(0)
    return _goodputs(table, num_sessions, rows, survivals)


def _goodputs(table: StepCost, num_sessions: int, rows: int, survivals: Floats) -> Floats:
    """Expected tokens/s of a step that verifies the first 0, 1, ... of the guesses, `[guesses + 1]`."""
    tokens = num_sessions + np.concatenate(([0.0], np.cumsum(survivals)))
    return np.asarray(tokens / table.with_guesses(rows, len(survivals)))
