"""Which nodes a step verifies, and the price of one more: policies over the trees of all sessions.

With nodes sorted by survival `s_1 >= s_2 >= ...`, `B` roots and a step that takes `T(rows)` seconds, the nodes worth
verifying are `best_prefix(B, s, T)` (`paceline.core.goodput`), and

    price = goodput(m*) * (T(B + m*) - T(B + m* - 1)).

The price is that of the last node that pays. Whether a verifier drafts at all is measured
(`paceline.core.drafting_mode`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Protocol

from paceline.core.drafting_mode import DraftingMode, Mode
from paceline.core.goodput import LEAST_SURVIVAL, Steps, best_prefix, is_worth
from paceline.core.moving_average import MovingAverage
from paceline.core.step_time import DEFAULT_STEP_COST, MOST_ROWS, StepCost, StepTimes
from paceline.core.tree import DraftTree, Node, best_nodes
from paceline.core.wait_for_drafts import Prospect

# Of drafters at work; 1 would make them idle.
MOST_PRICE = 0.99
# Weight of a step in the price that drafters receive.
PRICE_SMOOTHING = 0.1
# Share of the sessions with drafters whose drafters must have answered before a step shows what drafting is worth.
MOST_ANSWERED = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One decoding session, as the policies see it.

    Args:
        tree: Its guesses.
        cap: Most nodes it may have verified.
        chain: Whether they must be one chain.
        drafted: Whether a drafter is there for it.
        answered: Whether that drafter has answered since it was called to work, so that the tree is what it brings.
    """

    tree: DraftTree
    cap: int
    chain: bool = False
    drafted: bool = True
    answered: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a step verifies.

    Args:
        nodes: One tuple a session, parents before children.
    """

    nodes: tuple[tuple[Node, ...], ...]


class DraftPolicy(Protocol):
    """Policy that picks the nodes of a step."""

    @property
    def max_nodes(self) -> int:
        """Most nodes that any session may have verified in one step."""
        ...

    @property
    def price(self) -> float:
        """Least survival worth drafting for, which drafters receive with commits; 1: they idle."""
        ...

    @property
    def least_survival(self) -> float:
        """Least survival worth one more row in the last step, for sources whose guesses cost nothing but that."""
        ...

    @property
    def drafts(self) -> bool:
        """Whether the step that `enter` announced drafts; if not, nothing of speculation runs."""
        ...

    def start_from(
        self,
        cost: StepCost,
        *,
        plain: StepCost | None = None,
        doubt: float = 1.0,
        steps: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Takes a profile of steps.

        Args:
            cost: By rows, while drafters work.
            plain: While they idle; None: the same.
            doubt: How many times as far off as a measured profile it may be.
            steps: Rows and seconds of steps without guesses that were seen since.
        """
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

    def enter(self, num_sessions: int) -> bool:
        """Announces a step over so many sessions, those included whose prompts are read; returns whether it drafts.

        Args:
            num_sessions: How many; 0 where none of them may speculate.
        """
        ...

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0) -> Allocation:
        """Picks nodes for every session of a step that drafts.

        Args:
            demands: The sessions that decode.
            other_rows: Rows of the step that are taken (prefill).
        """
        ...

    def observe(self, *, roots: int, guesses: int, tokens: int, seconds: float, other_rows: int = 0) -> None:
        """Learns from a step.

        Args:
            roots: Sessions that decoded.
            guesses: Of theirs that it verified.
            tokens: What these sessions committed.
            seconds: From the end of the step before it.
            other_rows: Its rows of prompts.
        """
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

    @property
    def drafts(self) -> bool:
        """Always, unless gamma is 0."""
        return self.gamma > 0

    def start_from(
        self,
        cost: StepCost,
        *,
        plain: StepCost | None = None,
        doubt: float = 1.0,
        steps: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Ignores profiles."""

    def learned(self) -> dict[str, list[float]]:
        """Nothing."""
        return {}

    def resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        """Takes nothing over."""

    def enter(self, num_sessions: int) -> bool:
        """Drafts wherever a session may speculate, unless gamma is 0."""
        return num_sessions > 0 and self.drafts

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0) -> Allocation:
        """Picks the `gamma` best nodes of every session."""
        del other_rows
        chosen = tuple(tuple(best_nodes(each.tree, min(self.gamma, each.cap), chain=each.chain)) for each in demands)
        return Allocation(nodes=chosen)

    def observe(self, *, roots: int, guesses: int, tokens: int, seconds: float, other_rows: int = 0) -> None:
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
        cost: Of steps, by their rows.
        max_nodes: Most nodes a session may have verified in one step.

    Attributes:
        times: Of steps that draft.
        mode: Whether steps draft.
        least_survival: See `DraftPolicy`.
    """

    def __init__(self, cost: StepCost = DEFAULT_STEP_COST, *, max_nodes: int = 16) -> None:
        self.max_nodes = max_nodes
        self.least_survival = 0.0
        self.mode = DraftingMode()
        self._price: MovingAverage | None = None
        self._answered = True
        self.start_from(cost)

    @property
    def price(self) -> float:
        """That of the last guess that usually pays; 1 while the verifier decodes plainly."""
        if not self.drafts:
            return 1.0
        return 0.0 if self._price is None else min(MOST_PRICE, self._price.value)

    @property
    def drafts(self) -> bool:
        """Whether the step that was announced drafts."""
        return self.mode.mode is Mode.DRAFTING

    def start_from(
        self,
        cost: StepCost,
        *,
        plain: StepCost | None = None,
        doubt: float = 1.0,
        steps: Sequence[tuple[int, float]] = (),
    ) -> None:
        """Begins a new table of step times from a profile."""
        self._plain, self.times = plain or cost, StepTimes(cost, doubt=doubt)
        for rows, seconds in steps:
            self.times.observe(rows=rows, guesses=0, seconds=seconds)

    def learned(self) -> dict[str, list[float]]:
        """Step times, and the rates of both modes."""
        return {"step_times": self.times.learned(), "rates": self.mode.learned()}

    def resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        """Begins where a predecessor ended."""
        self.times.resume(learned["step_times"])
        self.mode.resume(learned["rates"])

    def enter(self, num_sessions: int) -> bool:
        """Decides whether a step drafts."""
        drafts = self.mode.enter(num_sessions) is Mode.DRAFTING
        if not drafts:
            self._price, self._answered = None, True
        return drafts

    def allocate(self, demands: Sequence[Demand], *, other_rows: int = 0) -> Allocation:
        """Picks the nodes of highest goodput."""
        # Prefill gives way to guesses within the step's bound, so only roots count beside them.
        ranked = self._ranked(demands)[: max(0, MOST_ROWS - len(demands))]
        chosen: list[list[Node]] = [[] for _ in demands]
        if demands:
            step = Steps(self.times.table, len(demands), other_rows)
            best = step.best([survival for survival, _, _ in ranked])
            self._set_prices(step.price(best), reads=other_rows > 0)
            for _, index, node in ranked[: best.count]:
                chosen[index].append(node)
        drafted = [each.answered for each in demands if each.drafted and each.cap]
        self._answered = sum(drafted) >= MOST_ANSWERED * len(drafted)
        return Allocation(nodes=tuple(map(tuple, chosen)))

    def _set_prices(self, price: float, *, reads: bool) -> None:
        self.least_survival = price
        if self._price is None:
            self._price = MovingAverage(price, PRICE_SMOOTHING)
        elif not reads:
            self._price.add(price)

    def observe(self, *, roots: int, guesses: int, tokens: int, seconds: float, other_rows: int = 0) -> None:
        """Learns the time of a step that drafts, and what the mode is worth from one that only decodes."""
        reads = other_rows > 0
        # Where most rows are those of prompts, the time is that of attention over long chunks.
        if self.drafts and other_rows <= roots + guesses:
            rows = roots + guesses + other_rows
            self.times.observe(rows=rows, guesses=guesses, seconds=seconds, mixed=reads)
        self.mode.observe(
            num_sessions=roots,
            tokens=tokens,
            seconds=seconds,
            plain_s=self._plain.at(roots),
            reads=reads,
            answered=self._answered,
        )

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
