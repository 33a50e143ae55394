"""How long steps take by their rows: a table measured at start, and two factors that every step teaches.

    seconds(roots, guesses) = whole * base(roots) + extra * (base(roots + guesses) - base(roots) + node * guesses)

`whole` is how much slower a mode's steps are than the table, `extra` the same for guesses: each is requested, judged,
and moved or dropped besides being a row. Rows of prompts are bounded by the times of the steps that had some.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError

Floats = npt.NDArray[np.float64]

# Rows at which a profile is taken; linear between them.
KNOTS = (1, 4, 8, 12, 14, 15, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# No guesses are taken beyond so many rows of a step: no profile has shown their time.
MOST_ROWS = KNOTS[-1]
# A factor, or its inverse, beyond which nothing is learned.
MOST_FACTOR = 2.0**20
# Share of its error by which a step moves the factors, more at first; how much less that of all rows moves than that of
# guesses, of which the table knows less; and the largest error of a step that is no accident.
WEIGHT, STIFFNESS, MOST_ERROR = 0.05, 0.25, 0.3
# Time that a guess is expected to take besides its row, as a share of a step of one row.
NODE_SHARE = 0.0025
# Longest step that has rows of prompts, and fewest such rows. A prompt of 1,501 tokens on a model of 1 G parameters,
# 512 rows a step, stopped a stream beside it for 9.8 s at a time.
PROMPT_STEP_S, LEAST_PROMPT_ROWS = 1.0, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds a step takes by its rows: linear between the points of a table, last slope beyond it.

    Args:
        rows: Increasing numbers of rows, the first at least 1.
        seconds: Time of a step with each of these numbers, never decreasing.
        context: Tokens of context that a guess attends in the time of the rest of its row; infinite where guesses share
            what the step reads for their session anyway.

    Raises:
        ConfigError: The table is empty or not monotone.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    context: float = math.inf

    def __post_init__(self) -> None:
        increase = all(map(operator.lt, self.rows, self.rows[1:])) and all(
            map(operator.le, self.seconds, self.seconds[1:])
        )
        if len(self.rows) < 2 or len(self.rows) != len(self.seconds) or not increase or not self.context > 0.0:
            raise ConfigError("step cost: needs at least two points of increasing rows and non-decreasing seconds")

    def at(self, rows: float) -> float:
        """Seconds of a step of `rows` rows."""
        right = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(self.seconds[0], y0 + (y1 - y0) * (rows - x0) / (x1 - x0))

    def from_to(self, first: int, last: int) -> Floats:
        """Seconds of steps with `first` to `last` rows, `[last - first + 1]`."""
        rows = np.arange(first, last + 1)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        beyond = np.maximum(rows - self.rows[-1], 0) * slope
        return np.asarray(np.interp(rows, self.rows, self.seconds) + beyond)

    def weights(self, lens: npt.NDArray[np.integer[Any]]) -> Floats:
        """Time of a guess of each session over that of a mean one, by the tokens that it attends, `[sessions]`."""
        times = 1.0 + lens / self.context
        return np.asarray(times / times.mean()) if len(lens) else times


# Shape of a weight-bound step on a CPU core with prepacked bfloat16 weights, relative to one row: 8 rows cost
# 1.4 times one row, 16 rows 1.9, and beyond 32 arithmetic is the cost.
DEFAULT_STEP_COST = StepCost(rows=(1, 4, 8, 16, 32, 64, 128), seconds=(1.0, 1.15, 1.4, 1.9, 2.9, 4.9, 9.0))


class StepTimes:
    """Seconds of steps by mode, learned from every one of them; see the module docstring.

    Args:
        cost: Measured at start, or a shape of any scale: the first step sets both factors.
        factors: By mode, as a predecessor learned them.

    Attributes:
        factors: `whole` and `extra` by mode; a mode without steps goes by the first one with some.

    Raises:
        ValueError: The factors are none.
    """

    def __init__(self, cost: StepCost, factors: Mapping[str, Sequence[float]] | None = None) -> None:
        self._cost, self._node_s, self._num_steps = cost, NODE_SHARE * cost.at(1), Counter[str]()
        self.factors = {mode: (float(whole), float(extra)) for mode, (whole, extra) in (factors or {}).items()}
        for pair in self.factors.values():
            if pair != tuple(map(_bounded, pair)):
                raise ValueError(f"needs two factors from {1.0 / MOST_FACTOR:g} to {MOST_FACTOR:g}, got {pair}")

    def _known(self, mode: str) -> tuple[float, float] | None:
        return self.factors.get(mode) or next(iter(self.factors.values()), None)

    def observe(self, mode: str, *, roots: int, guesses: float, seconds: float) -> None:
        """Adds the time of one step; of those with more than `MOST_ROWS` rows nothing is known.

        Args:
            roots: Its rows but for guesses.
            guesses: Its guesses, by weight.
            seconds: Time of the step itself, without waits and prompts.
        """
        if not 1 <= roots + guesses <= MOST_ROWS or not seconds > 0.0:
            return
        base = self._cost.at(roots)
        more = self._cost.at(roots + guesses) - base + self._node_s * guesses
        whole, extra = self._known(mode) or [_bounded(seconds / (base + more))] * 2
        expected = whole * base + extra * more
        error = min(max(seconds - expected, -MOST_ERROR * expected), MOST_ERROR * expected)
        # A step of normalised least mean squares (Widrow and Hoff, 1960), in which guesses take more of the error.
        trusted = STIFFNESS * base
        self._num_steps[mode] += 1
        share = max(WEIGHT, 1.0 / (1 + self._num_steps[mode])) * error / (trusted * base + more * more)
        self.factors[mode] = _bounded(whole + share * trusted), _bounded(extra + share * more)

    def with_guesses(self, mode: str, rows: int, most: int) -> Floats:
        """Seconds of steps of `rows` rows and 0 to `most` guesses, `[most + 1]`."""
        seconds, (whole, extra) = self._cost.from_to(rows, rows + most), self._known(mode) or (1.0, 1.0)
        more = seconds - seconds[0] + self._node_s * np.arange(most + 1)
        return np.asarray(whole * seconds[0] + extra * more)


def _bounded(factor: float) -> float:
    return min(max(1.0 / MOST_FACTOR, factor), MOST_FACTOR)


class PromptRows:
    """How many rows of prompts a step may have: it should take no longer than `PROMPT_STEP_S`.

    Tokens of all other sessions, and cancellations, wait for the step. Learned from the times of steps alone: where
    `rows` took `seconds`, the next step may have `rows * bound / seconds`. A step of `a + b * rows` seconds stays
    within the bound then, as `a` is counted anew for every row, and the number converges to that of the bound. A step
    with few rows shows less than one with many, so only a step above the bound makes the number smaller.
    """

    def __init__(self) -> None:
        self._most: float = math.inf

    def start_from(self, cost: StepCost) -> None:
        """Begins with the steps of a profile, and with few rows where these were slow."""
        self._most = LEAST_PROMPT_ROWS
        for rows, seconds in zip(cost.rows, cost.seconds, strict=True):
            if seconds <= PROMPT_STEP_S:
                self.observe(rows=rows, seconds=seconds)

    def most(self, limit: int) -> int:
        """Most rows of prompts in the next step, at most `limit`."""
        return int(min(limit, self._most))

    def observe(self, *, rows: int, seconds: float, plain_s: float = 0.0) -> None:
        """Adds the time of a step.

        Args:
            rows: Its rows of prompts.
            seconds: Its time.
            plain_s: Expected time of the same step without prompts: they may at least double it, or would never be read
                beside many sessions.
        """
        if not rows or not seconds > 0.0:
            return
        bound_s = max(PROMPT_STEP_S, 2.0 * plain_s)
        fitting = max(LEAST_PROMPT_ROWS, rows * bound_s / seconds)
        self._most = (min if seconds > bound_s else max)(self._most, fitting)
