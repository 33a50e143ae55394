"""Which nodes a step verifies, and the price of one more: policies over the trees of all sessions.

With nodes sorted by survival `s_1 >= s_2 >= ...`, `B` roots and a step that takes `T(rows)` seconds, the nodes worth
verifying are `best_prefix(B, s, T)` (`paceline.core.goodput`), and

    price = goodput(m*) * (T(B + m*) - T(B + m* - 1)).

Speculation off is the fixed point under load (m* = 0), not a special case.

Drafters work ahead of the step that uses their nodes, so the price that goes out looks ahead as well: it is that of
the nodes which sessions usually have in hand, at the load of now. A price of 1 lets drafters rest, and steps cost what
they cost without them. Sources inside the verifier do not rest; their guesses are there in plain steps too, and what
drafters bring is measured against steps with these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Protocol

import numpy as np

from paceline.core.drafting_switch import Drafting, DraftingSwitch
from paceline.core.goodput import Best, Floats, best_prefix, is_worth
from paceline.core.patience import Prospect
from paceline.core.step_cost import DEFAULT_STEP_COST, MOST_ROWS, StepCost, StepMode, StepTimes
from paceline.core.survivals import SessionSurvivals, UsualSurvivals, first_survivals
from paceline.core.tree import DraftTree, Node, best_first

# Nodes less likely than this are left out even where kernels compute their rows anyway.
LEAST_SURVIVAL = 0.05
# Of drafters at work; 1 would send them to rest.
MOST_PRICE = 0.99
# Weight of a step in the usual number of prefill rows: one that reads a prompt says little about those that follow.
OTHERS_SMOOTHING = 0.05
# Weight of a look in the share of drafters that have answered, and in what a choice among real trees is worth.
LOOK_SMOOTHING = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One decoding session as the allocator sees it.

    Args:
        tree: Its guesses.
        cap: Most nodes it may have verified.
        drafted: Whether a drafter is there for it.
        answered: Whether that drafter has answered since it was called to work, so that the tree is what it brings.
        own: Survivals of guesses that it has without a drafter, best first.
        num_unread: Tokens that its drafter would read before it could draft.
        usual: What it usually has in hand; the allocator keeps it up.
    """

    tree: DraftTree
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a step verifies, and what drafters are told with its commits.

    Args:
        nodes: One tuple a session, parents before children.
        prices: Of each session.
        price: Of sessions whose prompts are read.
    """

    nodes: tuple[tuple[Node, ...], ...]
    prices: tuple[float, ...]
    price: float


class Allocator(Protocol):
    """Policy that picks the nodes of a step."""

    @property
    def max_nodes(self) -> int:
        """Most nodes that any session may have verified in one step."""
        ...

    @property
    def price(self) -> float:
        """Least survival worth drafting for, of a session that begins; 1: its drafter rests."""
        ...

    @property
    def least_survival(self) -> float:
        """Least survival worth one more row in the last step, for sources whose guesses cost nothing but that."""
        ...

    def start_from(self, plain: StepCost, drafting: StepCost) -> None:
        """Takes profiles of plain steps and of steps with the threads left while drafters work."""
        ...

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: Sequence[bool] = ()) -> Allocation:
        """Picks nodes for every session.

        Args:
            demands: The sessions that decode.
            other_rows: Rows of the step that are spoken for (prefill).
            joining: Sessions whose prompts are being read, and that decode in the steps the price is for: whether their
                drafters' guesses would be of use.
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
        """For how many sessions, those of most gain first, a source that takes time is asked.

        Args:
            gains: Tokens that the source would add, of each session, best first.
            expected: Tokens of the whole step without it.
            step_s: Time of a step without it.
            call_s: Time of asking for so many sessions at once.
        """
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

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: Sequence[bool] = ()) -> Allocation:
        """See `Allocator`."""
        del other_rows, joining
        chosen = tuple(tuple(best_first(each.tree, min(self.gamma, each.cap))) for each in demands)
        return Allocation(nodes=chosen, prices=(self.price,) * len(demands), price=self.price)

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
        self.least_survival = 0.0
        # Of drafters at work.
        self._price = 0.0
        self._switch = DraftingSwitch()
        # While drafters work, and without them.
        self._in_hand = UsualSurvivals(first_survivals(max_nodes))
        self._own = UsualSurvivals(np.zeros(max_nodes))
        # Share of the drafters at work that have answered: the others read prompts, and that takes time, too.
        self._answered = 1.0
        # Goodput of steps over that of what sessions usually have: some have more at the time, and get the rows.
        self._choice = 1.0
        # Rows of prefill in a step, usually.
        self._other_rows = 0.0

    @property
    def price(self) -> float:
        """See `Allocator`."""
        return self._price if self._switch.drafting is Drafting.ALL else 1.0

    def start_from(self, plain: StepCost, drafting: StepCost) -> None:
        """See `Allocator`."""
        self.times = StepTimes(plain, drafting)

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0, joining: Sequence[bool] = ()) -> Allocation:
        """See `Allocator`."""
        self._other_rows += OTHERS_SMOOTHING * (other_rows - self._other_rows)
        rows = len(demands) + other_rows
        # Prefill gives way to guesses within the step's bound, so only roots count beside them.
        ranked = self._ranked(demands)[: max(0, MOST_ROWS - len(demands))]
        drafted = [each for each in demands if each.is_drafted]
        mode = StepMode.DRAFTING if any(map(self._drafts, drafted)) else StepMode.PLAIN
        table = self.times.table(mode)
        best = _best(table, len(demands), rows, [survival for survival, _, _ in ranked])
        self.least_survival = _price(best, table, rows)
        chosen: list[list[Node]] = [[] for _ in demands]
        for _, index, node in ranked[: best.count]:
            chosen[index].append(node)
        answered = any(each.answered for each in drafted)
        num_sessions = len(demands) + len(joining)
        if (drafted or any(joining)) and self._switch.is_due(num_sessions, answered=answered):
            self._look(ranked, demands)
            usual = [*(each.usual for each in drafted), *(SessionSurvivals() for joins in joining if joins)]
            self._judge(usual, num_sessions, None if other_rows else best.rate)
        self._choose_who_tries(drafted)
        prices = tuple(self._price if self._drafts(each) else 1.0 for each in demands)
        return Allocation(nodes=tuple(map(tuple, chosen)), prices=prices, price=self.price)

    def observe(self, *, rows: int, guesses: int, mode: StepMode, seconds: float, mixed: bool = False) -> None:
        """See `Allocator`."""
        self.times.observe(rows=rows, guesses=guesses, mode=mode, seconds=seconds, mixed=mixed)
        self._switch.observe(seconds)

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """See `Allocator`; the same objective, applied to time."""
        gain, expected = sum(each.gain for each in prospects), sum(each.expected for each in prospects)
        return is_worth(gain, expected, cost_s=wait_s, step_s=step_s)

    def num_asked(
        self, gains: Sequence[float], *, expected: float, step_s: float, call_s: Callable[[int], float]
    ) -> int:
        """See `Allocator`; the same objective, applied to the time of a call."""
        seconds = [step_s, *(step_s + call_s(count) for count in range(1, len(gains) + 1))]
        return best_prefix(expected, gains, seconds).count

    def _drafts(self, demand: Demand) -> bool:
        """Whether a session's drafter is at work."""
        drafting = self._switch.drafting
        return demand.is_drafted and (drafting is Drafting.ALL or (drafting is Drafting.SOME and demand.usual.tries))

    def _choose_who_tries(self, drafted: Sequence[Demand]) -> None:
        """While some sessions try their drafters, those that have the least to read at first."""
        if self._switch.drafting is not Drafting.SOME:
            for each in drafted:
                each.usual.tries = False
        elif drafted and not any(each.usual.tries for each in drafted):
            for each in sorted(drafted, key=attrgetter("num_unread"))[: self._switch.num_tried(len(drafted))]:
                each.usual.tries = True

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

    def _look(self, ranked: Sequence[tuple[float, int, Node]], demands: Sequence[Demand]) -> None:
        """Remembers what sessions that have drafters have in hand; a resting drafter's session is like the others."""
        survivals: list[list[float]] = [[] for _ in demands]
        for survival, index, _ in ranked:
            survivals[index].append(survival)
        held = [(each, found) for each, found in zip(demands, survivals, strict=True) if each.is_drafted]
        working = [(each, found) for each, found in held if self._drafts(each)]
        answered = [(each, found) for each, found in working if each.answered]
        if working:
            self._answered += LOOK_SMOOTHING * (len(answered) / len(working) - self._answered)
        self._own.see([each.usual.own for each, _ in held], [each.own[: each.cap] for each, _ in held])
        self._in_hand.see([each.usual.in_hand for each, _ in answered], [found for _, found in answered])
        self._in_hand.forget([each.usual.in_hand for each, _ in held if not self._drafts(each)])

    def _judge(self, drafted: Sequence[SessionSurvivals], num_sessions: int, rate: float | None) -> None:
        """For the steps to come, of so many sessions, some of them drafted for; some steps read prompts.

        The goodput of this step says what choosing is worth; None: it reads prompts, and says little.
        """
        rows = num_sessions + round(self._other_rows)
        room = max(0, MOST_ROWS - num_sessions)
        in_hand = self._in_hand.of_all([each.in_hand for each in drafted], round(len(drafted) * self._answered))
        own = self._own.of_all([each.own for each in drafted], len(drafted))
        plain = self.times.table(StepMode.PLAIN)
        without = _best(plain, num_sessions, rows, own[:room])
        drafting = self.times.table(StepMode.DRAFTING)
        with_drafters = _best(drafting, num_sessions, rows, in_hand[:room])
        if rate is not None and self._switch.drafting is Drafting.ALL:
            self._choice += LOOK_SMOOTHING * (rate / with_drafters.rate - self._choice)
        if_sure = _best(drafting, num_sessions, rows, np.ones_like(in_hand[:room]))
        self._switch.judge(
            self._choice * with_drafters.rate / without.rate,
            most_gain=if_sure.rate / without.rate,
            slowdown=drafting.at(rows) / plain.at(rows),
            num_sessions=num_sessions,
        )
        # What is tried is drafted for as if it were worth verifying.
        tried = self._switch.drafting is Drafting.SOME
        worth = _price(without, plain, rows) if tried else _price(with_drafters, drafting, rows)
        self._price = min(MOST_PRICE, worth)


def _best(table: StepCost, num_sessions: int, rows: int, survivals: Sequence[float] | Floats) -> Best:
    """How many of the guesses, best first, a step of so many rows besides verifies, and its goodput."""
    if not len(survivals):
        # In most steps of drafters at rest, and arrays of one element take a hundredth of a small model's step.
        return Best(0, num_sessions / table.at(rows))
    return best_prefix(num_sessions, survivals, table.with_guesses(rows, len(survivals)))


def _price(best: Best, table: StepCost, rows: int) -> float:
    """What the last of the best nodes costs in tokens: what is less likely is not worth a row.

    The last, not the next: where times bend, the next row may cost ten times as much, and sessions that have less in
    hand than usual have not come to it.
    """
    return max(LEAST_SURVIVAL, best.rate * table.slope(rows + max(1, best.count) - 1))
