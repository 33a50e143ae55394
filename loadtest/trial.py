"""Sides measured by turns, and the ratio of one to another.

Machines drift by a tenth between two rounds. So every round measures every side, every other one in the opposite order,
and ratios are made within a round. Rounds go on until what is asked is known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tqdm import tqdm

# Standard error at which a ratio is known; and how many of them from what is asked it is as good as known.
PRECISION, FAR = 0.01, 3.0

Side = TypeVar("Side", bound=Hashable)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Trial:
    """One side over another, as all rounds showed it: their ratios, at least one."""

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
    def num_rounds(self) -> int:
        """How many rounds there were."""
        return len(self.ratios)

    @property
    def error(self) -> float | None:
        """Standard error of the rounds' mean; one round tells nothing of it."""
        return statistics.stdev(self.ratios) / math.sqrt(self.num_rounds) if self.num_rounds > 1 else None

    def meets(self, *, least: float = -math.inf, most: float = math.inf) -> bool:
        """Whether the ratio keeps a goal; one met within its standard error is met."""
        slack = self.error or 0.0
        return least - slack <= self.ratio <= most + slack

    def is_known(self, goal: float | None = None) -> bool:
        """Whether another round would say little of the ratio, or of the side of the goal on which it lies."""
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
        sides: What takes turns, each once.
        measure: Runs one side's turn.
        rounds: The least.
        most_rounds: The most, where it is more than `rounds`.
        is_known: Whether another round would say little after these results.
        title: Of the progress bar.
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
