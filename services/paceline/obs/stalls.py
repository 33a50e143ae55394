"""How long the event loop of a process was blocked: the lateness of a callback that is due every few milliseconds.

Anything that holds the loop or the interpreter delays the callback, and with it every stream, probe and heartbeat of
the process.
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
    """The longest stall of the last minute; pure, times are arguments."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        # Durations fall: a longer stall supersedes the shorter ones before it.
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
    # uvloop's timers do not know when they were due, so `look` gets the time.
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
        "Longest time in the last minute for which the event loop was blocked: how late a callback came.",
        registry=registry,
    )
    gauge.set_function(lambda: longest.longest_s(loop.time()))
    look_at(loop.time() + INTERVAL_S)
    try:
        yield
    finally:
        timer.cancel()
