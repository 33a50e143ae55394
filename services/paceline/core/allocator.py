"""Which nodes a step verifies, and the price of one more: pure policies over the trees of all sessions.

With nodes sorted by survival `s_1 >= s_2 >= ...`, `B` roots and a step that takes `T(rows)` seconds,

    goodput(m) = (B + s_1 + ... + s_m) / T(B + m),   m* = argmax over all m,   price = goodput(m*) * dT/dm at m*.

Speculation off is the fixed point under load (m* = 0), not a special case. See DSpark (2607.05147) and TETRIS
(2502.15197) for the same allocation inside one box.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.core.errors import ConfigError
from paceline.core.patience import Prospect, worth_waiting
from paceline.core.tree import DraftTree, Node, best_first


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds a step takes by its rows: linear between the points of a table, last slope beyond it.

    Args:
        rows: Increasing numbers of rows, the first at least 1.
        seconds: Time of a step with so many rows, never decreasing.

    Raises:
        ConfigError: The table is empty or not monotone.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        """Checks the table."""
        increasing = all(low < high for low, high in zip(self.rows, self.rows[1:], strict=False))
        monotone = all(low <= high for low, high in zip(self.seconds, self.seconds[1:], strict=False))
        if len(self.rows) < 2 or len(self.rows) != len(self.seconds) or not (increasing and monotone):
            raise ConfigError("step cost: needs at least two points of increasing rows and non-decreasing seconds")

    def at(self, rows: int) -> float:
        """Seconds of a step with so many rows."""
        right = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(self.seconds[0], y0 + (y1 - y0) * (rows - x0) / (x1 - x0))

    def scaled(self, factor: float) -> StepCost:
        """The same shape, `factor` times as long."""
        return StepCost(rows=self.rows, seconds=tuple(value * factor for value in self.seconds))


# Shape of a weight-bound step on a CPU core with prepacked bfloat16 weights, relative to one row: 8 rows cost
# 1.4 times one row, 16 rows 1.9, and beyond 32 the arithmetic is what is paid for.
DEFAULT_STEP_COST = StepCost(rows=(1, 4, 8, 16, 32, 64, 128), seconds=(1.0, 1.15, 1.4, 1.9, 2.9, 4.9, 9.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One decoding session as the allocator sees it: its tree and the most nodes it may have verified."""

    tree: DraftTree
    cap: int


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

    def allocate(self, demands: Sequence[Demand], *, other_rows: int) -> Allocation:
        """Picks nodes for every session; `other_rows` rows of the step are spoken for (prefill)."""
        ...

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """True when the step should wait `wait_s` seconds for the next nodes rather than run now in `step_s`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedGamma:
    """Always the `gamma` best nodes of every session, whatever the load; for comparison and tests."""

    gamma: int

    @property
    def max_nodes(self) -> int:
        """See `Allocator`."""
        return self.gamma

    def allocate(self, demands: Sequence[Demand], *, other_rows: int) -> Allocation:
        """See `Allocator`; the price is 0 unless gamma is."""
        del other_rows
        chosen = tuple(tuple(best_first(each.tree, min(self.gamma, each.cap))) for each in demands)
        return Allocation(nodes=chosen, price=0.0 if self.gamma else 1.0)

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """See `Allocator`; waits until every session has its nodes, or they are overdue."""
        del wait_s, step_s
        return any(each.gain for each in prospects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The set of nodes that maximises expected committed tokens per second, by a given step cost.

    Args:
        cost: Time of a step by its rows.
        max_nodes: Most nodes a session may have verified in one step.
    """

    cost: StepCost = DEFAULT_STEP_COST
    max_nodes: int = 16

    def allocate(self, demands: Sequence[Demand], *, other_rows: int) -> Allocation:
        """See `Allocator`."""
        ranked = self._ranked(demands)
        num_roots = len(demands)
        rows = num_roots + other_rows
        expected, best, best_goodput = float(num_roots), 0, num_roots / self.cost.at(rows)
        for count, (survival, _, _) in enumerate(ranked, start=1):
            expected += survival
            goodput = expected / self.cost.at(rows + count)
            if goodput > best_goodput:
                best, best_goodput = count, goodput
        slope = self.cost.at(rows + best + 1) - self.cost.at(rows + best)
        chosen: list[list[Node]] = [[] for _ in demands]
        for _, index, node in ranked[:best]:
            chosen[index].append(node)
        return Allocation(nodes=tuple(map(tuple, chosen)), price=min(1.0, best_goodput * slope))

    def waits(self, prospects: Sequence[Prospect], *, wait_s: float, step_s: float) -> bool:
        """See `Allocator`; the same objective, applied to time."""
        return worth_waiting(prospects, wait_s=wait_s, step_s=step_s)

    def _ranked(self, demands: Sequence[Demand]) -> list[tuple[float, int, Node]]:
        ranked = [
            (each.tree.survival(node), index, node)
            for index, each in enumerate(demands)
            for node in best_first(each.tree, min(self.max_nodes, each.cap))
        ]
        ranked.sort(key=lambda entry: (-entry[0], entry[2].position - demands[entry[1]].tree.root.position, entry[1]))
        return ranked
