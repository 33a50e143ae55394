"""How long the event loop of a process stood still: the lateness of a callback that is due every few milliseconds.

Whatever holds the loop or the interpreter delays it, and with it every stream, probe and heartbeat of the process. It
knows no service.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Gauge

INTERVAL_S = 0.01
WINDOW_S = 60.0


class LongestStall:
    """The longest of the stalls of the last minute. Pure: it is told times."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        # A later one that is longer makes an earlier one pointless, so these fall.
        self._stalls: deque[tuple[float, float]] = deque()

    def add(self, stall_s: float, now_s: float) -> None:
        """Takes a stall that has just ended."""
        while self._stalls and self._stalls[-1][1] <= stall_s:
            self._stalls.pop()
        self._stalls.append((now_s, stall_s))
        self.longest_s(now_s)

    def longest_s(self, now_s: float) -> float:
        """Returns the longest stall of the window that ends now."""
        while self._stalls and self._stalls[0][0] < now_s - self._window_s:
            self._stalls.popleft()
        return self._stalls[0][1] if self._stalls else 0.0


@contextmanager
def stalls_watched(registry: CollectorRegistry) -> Iterator[None]:
    """Measures the stalls of the running event loop while a block runs, and shows the longest of the last minute."""
    loop = asyncio.get_running_loop()
    longest = LongestStall()
    # The next look. That of uvloop does not know when it is due if that is at once.
    timer: asyncio.Handle

    def look(due_s: float) -> None:
        now_s = loop.time()
        longest.add(max(0.0, now_s - due_s), now_s)
        look_at(now_s + INTERVAL_S)

    def look_at(due_s: float) -> None:
        nonlocal timer
        timer = loop.call_at(due_s, look, due_s)

    gauge = Gauge(
        "paceline:event_loop_stall_seconds",
        "Longest time in the last minute for which the event loop answered nobody: how late a callback came.",
        registry=registry,
    )
    gauge.set_function(lambda: longest.longest_s(loop.time()))
    look_at(loop.time() + INTERVAL_S)
    try:
        yield
    finally:
        timer.cancel()
