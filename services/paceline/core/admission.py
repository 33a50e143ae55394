"""How long a new session would wait for its turn, and whether it may; pure, time comes in as an argument.

By Little's law (1961) a queue of `ahead` sessions that leave at `rate` a second is `ahead / rate` seconds long. The
rate is that of the last sessions that ended while others waited: at other times it would be the rate of requests, not
the rate that is possible.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from paceline.core.errors import OverloadedError

# Ends that the rate is taken from; with fewer than `LEAST_ENDS` there is none yet.
NUM_ENDS = 64
LEAST_ENDS = 2
LEAST_RETRY_S = 0.5


class QueueClock:
    """Estimates the length of a queue in seconds, from when sessions ended."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=NUM_ENDS)

    def ended(self, now_s: float, *, num_waiting: int) -> None:
        """A session ended while `num_waiting` others waited for a place."""
        if num_waiting:
            self._ends_s.append(now_s)
        else:
            self._ends_s.clear()

    def wait_s(self, now_s: float, *, ahead: int) -> float:
        """Expected seconds until `ahead` sessions have ended; 0 while nothing is known."""
        if ahead <= 0 or len(self._ends_s) < LEAST_ENDS:
            return 0.0
        # The time since the last end counts, so that a stall makes the queue longer.
        span_s = now_s - self._ends_s[0]
        return ahead * span_s / len(self._ends_s)


def num_ahead(priority: int, others: Sequence[int], *, num_places: int) -> int:
    """Returns how many sessions must end before a new one gets a place.

    Args:
        priority: Its own.
        others: Of those under way; some of them have the places, whatever their priority.
        num_places: How many places there are.
    """
    if len(others) < num_places:
        return 0
    before_it = sum(1 for other in others if other <= priority)
    return max(1, before_it + 1 - num_places)


def check_wait(wait_s: float, most_s: float | None) -> None:
    """Refuses a session that would wait longer than it may.

    Args:
        wait_s: Expected wait.
        most_s: Longest wait asked for; None: any.

    Raises:
        OverloadedError: It would; says when to come again.
    """
    if most_s is not None and wait_s > most_s:
        raise OverloadedError(
            f"a place would be free in about {wait_s:.1f} s, the request may wait {most_s:.1f} s",
            retry_after_s=max(LEAST_RETRY_S, wait_s - most_s),
        )
