"""What a step costs by its rows: a table measured before there are sessions, and what traffic shows of it since."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Rows at which steps are measured before there are sessions; linear between them.
KNOTS = (1, 4, 8, 12, 14, 15, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# No guesses are taken beyond: what such steps cost was never measured.
MOST_ROWS = KNOTS[-1]
# Spread of single steps around their expectation, as a share of it; and how far off, in spreads, one may be before it
# is an accident.
NOISE, CLIP = 0.2, 3.0
# How far the factors may be off at first, both together and each for itself; least and most that they may become; and
# the share of that uncertainty which comes back with every step.
START = np.full((2, 2), 0.3**2) + np.diag([0.1**2, 0.5**2])
FACTORS = 0.05, 20.0
FORGETTING = 0.001


def _is_monotone(values: Sequence[float]) -> bool:
    return all(map(operator.le, values, values[1:]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds a step takes by its rows: linear between the points of a table, last slope beyond it.

    Args:
        rows: Increasing numbers of rows, the first at least 1.
        seconds: Time of a step with each of these numbers, never decreasing.
        node_s: Seconds that a guess costs besides its row.
        computed: [most rows + 1], by rows the rows that the model really computes: kernels round up. None: the same.

    Raises:
        ConfigError: The table is empty or not monotone.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    node_s: float = 0.0
    computed: Ints | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        increasing = all(map(operator.lt, self.rows, self.rows[1:]))
        if len(self.rows) < 2 or len(self.rows) != len(self.seconds) or not (increasing and _is_monotone(self.seconds)):
            raise ConfigError("step cost: needs at least two points of increasing rows and non-decreasing seconds")

    def at(self, rows: int) -> float:
        """Seconds of a step of `rows` rows."""
        return self._between(self.rows_computed(rows))

    def slope(self, rows: int) -> float:
        """Seconds of one guess more, rounding apart."""
        return self._between(rows + 1) - self._between(rows) + self.node_s

    def rows_computed(self, rows: int) -> int:
        """Rows that the model computes for `rows` rows."""
        return int(self.computed[rows]) if self.computed is not None and rows < len(self.computed) else rows

    def _between(self, rows: int) -> float:
        right = min(max(bisect_right(self.rows, rows), 1), len(self.rows) - 1)
        x0, x1 = self.rows[right - 1], self.rows[right]
        y0, y1 = self.seconds[right - 1], self.seconds[right]
        return max(self.seconds[0], y0 + (y1 - y0) * (rows - x0) / (x1 - x0))

    def from_to(self, first: int, last: int) -> Floats:
        """Seconds of steps with `first` to `last` rows, `[last - first + 1]`."""
        rows = np.arange(first, last + 1)
        if self.computed is not None:
            known = min(max(len(self.computed) - first, 0), len(rows))
            rows[:known] = self.computed[first : first + known]
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
    """Two factors on the seconds of a profile, one on a step's roots and one on its guesses, learned from every step.

    Recursive least squares in its Kalman form. The factors drift together far more than apart: a machine gets slower
    as a whole.
    """

    def __init__(self) -> None:
        self._factors = np.ones(2)
        self._spread = START

    def seconds(self, table: Floats) -> Floats:
        """Seconds of steps with 0, 1, ... guesses, from what a profile says of them, `[guesses + 1]`."""
        return np.asarray(self._factors[0] * table[0] + self._factors[1] * (table - table[0]))

    @property
    def guess(self) -> float:
        """The factor on guesses."""
        return float(self._factors[1])

    def observe(self, *, roots_s: float, guesses_s: float, seconds: float) -> None:
        """Takes in the time of one step.

        Args:
            roots_s: What a profile says of its roots.
            guesses_s: The same of its guesses.
            seconds: From the end of the step before it.
        """
        weights = np.array([roots_s, guesses_s])
        expected = float(weights @ self._factors)
        self._spread = self._spread + FORGETTING * (START - self._spread)
        shared = self._spread @ weights
        surprise = float(weights @ shared) + (NOISE * expected) ** 2
        error = float(np.clip(seconds - expected, -CLIP * surprise**0.5, CLIP * surprise**0.5))
        self._factors = np.clip(self._factors + shared / surprise * error, *FACTORS)
        self._spread = self._spread - np.outer(shared, shared) / surprise

    def learned(self) -> list[float]:
        """The factors; see `resume`."""
        return [float(each) for each in self._factors]

    def resume(self, factors: Sequence[float]) -> None:
        """Begins with what a predecessor has learned; how sure it was is not taken over.

        Raises:
            ValueError: It is not that of such a table.
        """
        known = np.asarray(factors, dtype=np.float64)
        if known.shape != self._factors.shape or not np.all(np.isfinite(known)):
            raise ValueError(f"needs {len(self._factors)} finite factors, got {known.shape}")
        self._factors = np.clip(known, *FACTORS)
