"""Whether enough rounds were run: machines drift by a tenth between two of them, and what is asked may be near."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Standard error at which a ratio is known; and how many of them from what is asked it is as good as known.
PRECISION, FAR = 0.01, 3.0


def standard_error(ratios: Sequence[float]) -> float:
    """Of the mean of the rounds' ratios; infinite for a single round."""
    return statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf


def is_known(ratios: Sequence[float], asked: float) -> bool:
    """Whether another round would say little of a ratio and of which side of what is asked it lies on."""
    error = standard_error(ratios)
    return error <= PRECISION or abs(statistics.median(ratios) - asked) > FAR * error
