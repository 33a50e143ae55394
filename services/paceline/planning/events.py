"""What happens when in a simulation, and the time in it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Act = Callable[[], None]


class Events:
    """Acts in the order of their times; of equal times in the order they were planned in."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Act]] = []
        self._count = 0

    def after(self, delay_s: float, act: Act) -> None:
        """Lets something happen after a delay."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, act))

    def run(self, until_s: float = math.inf) -> None:
        """Lets everything happen until nothing is left, or the time has come to stop."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._heap)
            act()
