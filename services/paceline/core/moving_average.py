"""A mean of numbers that come one by one, in which the latest count most."""

from __future__ import annotations

from dataclasses import dataclass

# Of a new observation: the last ten or so count.
USUAL_WEIGHT = 0.1


@dataclass(slots=True)
class MovingAverage:
    """Exponential smoothing.

    Args:
        value: The mean; before anything is observed, what is expected.
        weight: Of a new observation, from 0 to 1.
    """

    value: float
    weight: float = USUAL_WEIGHT

    def add(self, observed: float) -> None:
        self.value += self.weight * (observed - self.value)
