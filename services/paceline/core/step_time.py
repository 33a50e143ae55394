"""What a step costs by its rows: a table, and the model that learns one from every step.

The learned model is recursive least squares in its Kalman form: the state holds, for each point of the table, a factor
on what the start-up profile measured, and one on what a guess costs besides its row: it is requested, judged, and moved
or dropped. Factors drift together (a machine gets slower as a whole) far
more than apart, so one observation moves all points, and the one it was made at most. Points that are not visited
grow uncertain, and are learned the faster when they are.
"""

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

# Rows at which a profile is taken and a factor is learned; linear between them.
KNOTS = (1, 4, 8, 12, 14, 15, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# Steps with more are not learned, so no guesses are taken beyond them: their cost would never be learned.
MOST_ROWS = KNOTS[-1]
# Least spread of single steps around their expectation, as a share of it; how fast their spread is learned, a step; and
# how far off, in spreads, one may be before it is an accident.
NOISE, NOISE_SMOOTHING, CLIP = 0.08, 0.02, 3.0
# Standard deviation of a normal error over its mean size.
SIGMA_OF_SIZE = 1.25
# How far factors may be off at the start: all together, and each for itself; and the share of that uncertainty which
# comes back with every step, so that what was not seen for a thousand steps is as good as unknown.
LEVEL, SHAPE = 0.3, 0.1
# Least and most that a factor may become.
FACTORS = 0.05, 20.0
# Seconds that a guess is taken to cost besides its row, and how far off that may be, as a share.
NODE_S, NODE_DOUBT = 5e-5, 0.5
FORGETTING = 0.001
# Points this far apart (in log rows) keep 1/e of their correlation.
REACH = 1.5


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
    """Seconds of a step by rows, learned from every step.

    Args:
        cost: Measured at start, or a shape to begin with.
        doubt: How many times as far off as a measured one it may be.
    """

    def __init__(self, cost: StepCost, *, doubt: float = 1.0) -> None:
        self._computed = cost.computed
        seconds = replace(cost, computed=None).from_to(0, MOST_ROWS)[list(KNOTS)]
        self._base = np.concatenate([seconds, [cost.node_s or NODE_S]])
        knots = np.log(KNOTS)
        near = np.exp(-np.abs(knots[:, None] - knots[None]) / REACH)
        self._start = np.full((len(self._base), len(self._base)), LEVEL**2)
        self._start[:-1, :-1] += SHAPE**2 * near
        self._start[-1, -1] += NODE_DOUBT**2
        self._factors = np.ones(len(self._base))
        self._spread = doubt**2 * self._start
        self._noise = NOISE
        self._table: StepCost | None = None

    def observe(self, *, rows: int, guesses: int, seconds: float) -> None:
        """Adds the time of one step; those with more rows than the table are left out.

        Args:
            rows: Of the step.
            guesses: How many of them were guesses.
            seconds: From the end of the step before it.
        """
        if self._computed is not None and rows < len(self._computed):
            rows = int(self._computed[rows])
        if not 1 <= rows <= MOST_ROWS:
            return
        weights = self._weights(rows, guesses)
        expected = float(weights @ self._factors)
        self._spread += FORGETTING * (self._start - self._spread)
        shared = self._spread @ weights
        surprise = float(weights @ shared) + (self._noise * expected) ** 2
        error = float(np.clip(seconds - expected, -CLIP * surprise**0.5, CLIP * surprise**0.5))
        # Beside a busy gateway steps of a small model scatter by a third; taken for news, that would shake the table.
        size = SIGMA_OF_SIZE * abs(error) / expected
        self._noise = max(NOISE, self._noise + NOISE_SMOOTHING * (size - self._noise))
        self._factors = np.clip(self._factors + shared / surprise * error, *FACTORS)
        self._spread -= np.outer(shared, shared) / surprise
        self._table = None

    @property
    def table(self) -> StepCost:
        """The present table, made monotone."""
        if self._table is None:
            seconds = _isotonic((self._factors[:-1] * self._base[:-1]).tolist())
            node_s = float(self._factors[-1] * self._base[-1])
            self._table = StepCost(rows=KNOTS, seconds=tuple(seconds), node_s=node_s, computed=self._computed)
        return self._table

    def learned(self) -> list[float]:
        """Factors on what was measured at start; see `resume`."""
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
        self._table = None

    def _weights(self, rows: int, guesses: int) -> Floats:
        """Seconds that each factor stands for in a step of `rows` rows, `guesses` of them guesses."""
        right = min(max(bisect_right(KNOTS, rows), 1), len(KNOTS) - 1)
        share = (rows - KNOTS[right - 1]) / (KNOTS[right] - KNOTS[right - 1])
        weights = np.zeros(len(self._base))
        weights[-1] = guesses * self._base[-1]
        weights[right - 1], weights[right] = (1.0 - share) * self._base[right - 1], share * self._base[right]
        return weights


def _isotonic(values: list[float]) -> list[float]:
    """Nearest never-decreasing values (pool adjacent violators)."""
    if _is_monotone(values):
        return values
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        mean, count = value, 1
        while means and means[-1] > mean:
            last, number = means.pop(), counts.pop()
            mean, count = (mean * count + last * number) / (count + number), count + number
        means.append(mean)
        counts.append(count)
    return [mean for mean, count in zip(means, counts, strict=True) for _ in range(count)]
