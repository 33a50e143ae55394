"""The one objective: expected tokens over the seconds that they take.

Each option of a step brings some expected tokens for some seconds: verify one more guess, wait for the
next ones. Of options in their order of merit, with expected tokens `E` before any of them and gains
`g_1 >= g_2 >= ...`, the best are the first

    m* = argmax over all m of (E + g_1 + ... + g_m) / T(m).

All m, not the first local maximum: times bend where kernels round up. See DSpark (2607.05147) and TETRIS (2502.15197)
for the same objective inside one box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.step_time import Floats

# Guesses less likely than this are left out even where kernels compute their rows anyway.
LEAST_SURVIVAL = 0.05


def best_prefix(
    expected: float, gains: Sequence[float] | Floats, seconds: Sequence[float] | Floats
) -> tuple[int, float]:
    """The fewest options of highest goodput, and the tokens/s with them; see the module docstring.

    Args:
        expected: Tokens without any of them.
        gains: Tokens of each, best first, `[options]`.
        seconds: Time with the first 0, 1, ... of them, `[options + 1]`.
    """
    rates = (expected + np.concatenate(([0.0], np.cumsum(gains)))) / seconds
    count = int(np.argmax(rates))
    return count, float(rates[count])


def is_worth(gain: float, expected: float, *, cost_s: float, step_s: float) -> bool:
    """Whether one option is worth taking: `best_prefix` of it alone, for a step of `step_s` seconds."""
    return gain * step_s > expected * cost_s


# Weight of a new observation: the last ten or so count.
USUAL_WEIGHT = 0.1


@dataclass(slots=True)
class MovingAverage:
    """Exponential smoothing.

    Args:
        value: The mean; before anything is observed, what is expected.
        weight: Weight of a new observation, from 0 to 1.
    """

    value: float
    weight: float = USUAL_WEIGHT

    def add(self, observed: float) -> None:
        self.value += self.weight * (observed - self.value)
