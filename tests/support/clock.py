"""A clock that only tests move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Returns the time that a test has set, which goes on by a tick with each look."""

    now_s: float = 0.0
    tick_s: float = 0.0

    def __call__(self) -> float:
        """The time in seconds."""
        self.now_s += self.tick_s
        return self.now_s
