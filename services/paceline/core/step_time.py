"""What a step costs by its rows: a table that is measured at start, and two factors on it that every step teaches.

    seconds(roots, guesses) = whole * base(roots) + extra * (base(roots + guesses) - base(roots) + node_s * guesses)

`whole` is how much slower the machine is than it was at start, `extra` the same for what guesses add: each is
requested, judged, and moved or dropped besides being a row. They are learned by recursive least squares in its Kalman
form.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError

Floats = npt.NDArray[np.float64]

# Rows at which a profile is taken; linear between them.
KNOTS = (1, 4, 8, 12, 14, 15, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# No guesses are taken beyond so many rows of a step: no profile has shown what these cost.
MOST_ROWS = KNOTS[-1]
# Least spread of single steps around their expectation, as a share of it; how fast their spread is learned, a step; and
# how far off, in spreads, one may be before it is an accident.
NOISE, NOISE_SMOOTHING, CLIP = 0.08, 0.02, 3.0
# Standard deviation of a normal error over its mean size.
SIGMA_OF_SIZE = 1.25
# How far off both factors may be together at the start, and that of guesses for itself; and the share of that
# uncertainty which comes back with every step, so that what was not seen for a thousand steps is as good as unknown.
LEVEL, GUESS_DOUBT, FORGETTING = 0.3, 0.5, 0.001
# Least and most that a factor may become.
FACTORS = 0.05, 20.0
# Seconds that a guess is taken to cost besides its row.
NODE_S = 5e-5


def _is_monotone(values: Sequence[float]) -> bool:
    return all(map(operator.le, values, values[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds a step takes by its rows: linear between the points of a table, last slope beyond it.

    Args:
        rows: Increasing numbers of rows, the first at least 1.
        seconds: Time of a step with each of these numbers, never decreasing.
        node_s: Seconds that a guess costs besides its row.

    Raises:
        ConfigError: The table is empty or not monotone.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    node_s: float = 0.0

    def __post_init__(self) -> None:
        increasing = all(map(operator.lt, self.rows, self.rows[1:]))
        if len(self.rows) < 2 or len(self.rows) != len(self.seconds) or not (increasing and _is_monotone(self.seconds)):
            raise ConfigError("step cost: needs at least two points of increasing rows and non-decreasing seconds")

    def at(self, rows: int) -> float:
        """Seconds of a step of `rows` rows."""
        right = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(self.seconds[0], y0 + (y1 - y0) * (rows - x0) / (x1 - x0))

    def slope(self, rows: int) -> float:
        """Seconds of one guess more."""
        return self.at(rows + 1) - self.at(rows) + self.node_s

    def from_to(self, first: int, last: int) -> Floats:
        """Seconds of steps with `first` to `last` rows, `[last - first + 1]`."""
        rows = np.arange(first, last + 1)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
        beyond = np.maximum(rows - self.rows[-1], 0) * slope
        return np.asarray(np.interp(rows, self.rows, self.seconds) + beyond)

    def with_guesses(self, rows: int, most: int) -> Floats:
        """Seconds of steps of `rows` rows and 0 to `most` guesses, `[most + 1]`."""
        return self.from_to(rows, rows + most) + self.node_s * np.arange(most + 1)

    def scaled(self, factor: float) -> StepCost:
        """The same shape, `factor` times as long."""
        return replace(self, seconds=tuple(value * factor for value in self.seconds), node_s=self.node_s * factor)


# Shape of a weight-bound step on a CPU core with prepacked bfloat16 weights, relative to one row: 8 rows cost
# 1.4 times one row, 16 rows 1.9, and beyond 32 arithmetic is the cost.
DEFAULT_STEP_COST = StepCost(rows=(1, 4, 8, 16, 32, 64, 128), seconds=(1.0, 1.15, 1.4, 1.9, 2.9, 4.9, 9.0))


class StepTimes:
    """Seconds of steps that draft, learned from every one of them; see the module docstring.

    Args:
        cost: Measured at start, or a shape to begin with.
        doubt: How many times as far off as a measured one it may be.
    """

    def __init__(self, cost: StepCost, *, doubt: float = 1.0) -> None:
        self._base = cost if cost.node_s else replace(cost, node_s=NODE_S)
        self._start = LEVEL**2 + np.diag((0.0, GUESS_DOUBT**2))
        self._factors, self._spread = np.ones(2), doubt**2 * self._start
        self._noise = NOISE

    def observe(self, *, roots: int, guesses: int, seconds: float) -> None:
        """Adds the time of one step; of those with more than `MOST_ROWS` rows nothing is known.

        Args:
            roots: Its rows but for guesses.
            guesses: Its guesses.
            seconds: Of the step itself, without waits and prompts.
        """
        if not 1 <= roots + guesses <= MOST_ROWS:
            return
        whole = self._base.at(roots)
        weights = np.array((whole, self._base.at(roots + guesses) - whole + self._base.node_s * guesses))
        expected = float(weights @ self._factors)
        self._spread = self._spread + FORGETTING * (self._start - self._spread)
        shared = self._spread @ weights
        surprise = float(weights @ shared) + (self._noise * expected) ** 2
        error = float(np.clip(seconds - expected, -CLIP * surprise**0.5, CLIP * surprise**0.5))
        # Beside a busy gateway steps of a small model scatter by a third; taken for news, that would shake the factors.
        size = SIGMA_OF_SIZE * abs(error) / expected
        self._noise = max(NOISE, self._noise + NOISE_SMOOTHING * (size - self._noise))
        self._factors = np.clip(self._factors + shared / surprise * error, *FACTORS)
        self._spread -= np.outer(shared, shared) / surprise

    def with_guesses(self, rows: int, most: int) -> Floats:
        """Seconds of steps of `rows` rows and 0 to `most` guesses, `[most + 1]`."""
        seconds, (whole, extra) = self._base.with_guesses(rows, most), self._factors
        return np.asarray(whole * seconds[0] + extra * (seconds - seconds[0]))

    def slope(self, rows: int) -> float:
        """Seconds of one guess more than make `rows` rows."""
        return float(self._factors[1]) * self._base.slope(rows)

    def learned(self) -> list[float]:
        """Both factors; see `resume`."""
        return [float(each) for each in self._factors]

    def resume(self, factors: Sequence[float]) -> None:
        """Begins with what a predecessor has learned; how sure it was is not taken over.

        Raises:
            ValueError: It is not what `learned` gives.
        """
        known = np.asarray(factors, dtype=np.float64)
        if known.shape != self._factors.shape or not np.all(np.isfinite(known)):
            raise ValueError(f"needs {len(self._factors)} finite factors, got {known.shape}")
        self._factors = np.clip(known, *FACTORS)
