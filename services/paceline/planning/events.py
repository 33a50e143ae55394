"""What happens when in a simulation, and the time in it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

import numpy as np

Act = Callable[[], None]


class Events:
    """Acts in the order of their times; of equal times in the order they were planned in.

    Args:
        seed: Of the luck.
    """

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Act]] = []
        self._count = 0
        self._chance = np.random.default_rng(seed)

    def after(self, delay_s: float, act: Act) -> None:
        """Lets something happen after a delay."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, act))

    def run(self, until_s: float = math.inf) -> None:
        """Lets everything happen until nothing is left, or the time has come to stop."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._heap)
            act()

    def luck(self, noise: float) -> float:
        """A factor on an expected time of mean 1; `noise` is the standard deviation of its logarithm."""
        if not noise:
            return 1.0
        return math.exp(noise * float(self._chance.standard_normal()) - noise**2 / 2)
