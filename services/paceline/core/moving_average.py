"""A mean of numbers that come one by one, in which the latest count most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class MovingAverage:
    """Exponential smoothing.

    Args:
        value: The mean; before anything is observed, what is expected.
        weight: Of a new observation, from 0 to 1.
    """

    value: float
    weight: float

    def add(self, observed: float) -> None:
        """Takes in an observation."""
        self.value += self.weight * (observed - self.value)
