"""Sides measured by turns, and the ratio of one to another.

Machines drift by a tenth between two rounds. So every round measures every side, every other one in the opposite order,
and ratios are made within a round. Rounds go on until the answer is known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tqdm import tqdm

# Standard error at which a ratio is known; and how many such errors away from its goal it is known well enough.
PRECISION, FAR = 0.01, 3.0

Side = TypeVar("Side", bound=Hashable)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Trial:
    """Ratios of one side to another over all rounds, at least one."""

    ratios: tuple[float, ...]

    @classmethod
    def of(cls, side: Iterable[float], base: Iterable[float]) -> Trial:
        """Figures of one side over those of another, round by round."""
        return cls(tuple(mine / its for mine, its in zip(side, base, strict=True)))

    @property
    def ratio(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.ratios)

    @property
    def error(self) -> float | None:
        """Standard error of the rounds' mean; None after one round."""
        return statistics.stdev(self.ratios) / math.sqrt(len(self.ratios)) if len(self.ratios) > 1 else None

    def meets(self, *, least: float = -math.inf, most: float = math.inf) -> bool:
        """Whether the ratio keeps a goal; one met within its standard error is met."""
        slack = self.error or 0.0
        return least - slack <= self.ratio <= most + slack

    def is_known(self, goal: float | None = None) -> bool:
        """Whether another round would change little: the ratio is precise, or lies far from the goal."""
        if self.error is None:
            return False
        is_far = goal is not None and abs(self.ratio - goal) > FAR * self.error
        return self.error <= PRECISION or is_far


def rounded_error(*trials: Trial) -> float | None:
    """The standard error of the least certain trial, to be shown; None after one round."""
    errors = [trial.error for trial in trials if trial.error is not None]
    return round(max(errors), 3) if errors else None


async def take_turns(
    sides: Sequence[Side],
    measure: Callable[[Side], Awaitable[Result]],
    *,
    rounds: int,
    most_rounds: int = 0,
    is_known: Callable[[Mapping[Side, Sequence[Result]]], bool] = lambda _: False,
    title: str,
) -> dict[Side, list[Result]]:
    """Measures each side once a round; returns what was measured by side, one result a round.

    Args:
        sides: Sides that take turns, each once.
        measure: Runs one side's turn.
        rounds: The least.
        most_rounds: The most, where it is more than `rounds`.
        is_known: Whether another round would change little after these results.
        title: Title of the progress bar.
    """
    results: dict[Side, list[Result]] = {side: [] for side in sides}
    most = max(rounds, most_rounds)
    with tqdm(total=most * len(sides), desc=title, unit="turn", leave=False) as bar:
        for number in range(most):
            if number >= rounds and is_known(results):
                break
            for side in sides[::-1] if number % 2 else sides:
                results[side].append(await measure(side))
                bar.update()
    return results
