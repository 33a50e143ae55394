"""Something that each caller may use at a steady rate, with a reserve for bursts; a token bucket.

It knows neither what is used nor who the callers are.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Allowance:
    """What callers may use, each by itself; may be used from several threads.

    What something costs is known when it is done. So a caller begins while anything is left, and may get into debt.

    Args:
        burst: The reserve of a caller who has used nothing for long.
        per_s: What is added each second, up to that.
        clock: Monotonic seconds.
    """

    def __init__(self, *, burst: float, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._lock = threading.Lock()
        # When the reserve of a caller will be full again; those whose reserves are full are forgotten.
        self._full_at_s: dict[str, float] = {}

    def wait_s(self, caller: str) -> float:
        """Returns how long a caller has to wait until something is left; 0: something is."""
        with self._lock:
            missing = (self._full_at_s.get(caller, 0.0) - self._clock()) * self._per_s
            return max(0.0, missing - self._burst) / self._per_s

    def use(self, caller: str, amount: float) -> None:
        """Takes an amount from what a caller has left."""
        with self._lock:
            now_s = self._clock()
            self._full_at_s = {name: full_s for name, full_s in self._full_at_s.items() if full_s > now_s}
            self._full_at_s[caller] = self._full_at_s.get(caller, now_s) + amount / self._per_s
