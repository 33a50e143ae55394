"""Bounded things that callers hold parts of, none at the cost of others: bytes being read, calls, places in a queue.

It knows neither HTTP nor gRPC, nor what is held.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Self

from paceline.core.errors import OverloadedError
from paceline.gateway.access.callers import Caller
from paceline.gateway.access.fairness import fits

RETRY_AFTER_S = 1.0


class Shares:
    """So many of a thing in all, shared by the callers as `paceline.gateway.access.fairness` says.

    Args:
        total: All there is.
        what: Its name in refusals, such as "bytes of requests being read".
        unit: What one request takes at most.
    """

    def __init__(self, total: int, what: str, *, unit: int = 1) -> None:
        self.total = total
        self.what = what
        self._unit = unit
        self._held: Counter[str] = Counter()
        self._freed: set[asyncio.Event] = set()

    @property
    def num_held(self) -> int:
        """What is held by all callers."""
        return self._held.total()

    def take(self, amount: int, caller: Caller) -> Held:
        """Holds so much for a caller.

        Raises:
            OverloadedError: There is not that much, or it is for other callers.
        """
        held = Held(self, caller)
        held.resize(amount)
        return held

    async def wait(self, amount: int, caller: Caller) -> Held:
        """Holds so much for a caller as soon as it is there; for a bounded time only where the caller says so."""
        freed = asyncio.Event()
        self._freed.add(freed)
        try:
            while True:
                with suppress(OverloadedError):
                    return self.take(amount, caller)
                freed.clear()
                await freed.wait()
        finally:
            self._freed.discard(freed)

    def change(self, change: int, caller: Caller) -> None:
        """Takes more for a caller, or gives some of it back.

        Raises:
            OverloadedError: There is not that much, or it is for other callers.
        """
        if change > 0 and not fits(
            change,
            key=caller.name,
            held=self._held,
            num_keys=caller.num_keys,
            max_sessions=self.total,
            unit=self._unit,
        ):
            raise OverloadedError(
                f"{self.num_held} of {self.total} {self.what} are taken, {change} more were asked for",
                retry_after_s=RETRY_AFTER_S,
            )
        self._held[caller.name] += change
        if change < 0:
            # Callers come and go; those that hold nothing are forgotten.
            self._held += Counter()
            for freed in self._freed:
                freed.set()


class Held:
    """What a caller holds; a context manager that gives it back."""

    def __init__(self, shares: Shares, caller: Caller) -> None:
        self._shares = shares
        self._caller = caller
        self._amount = 0

    def resize(self, amount: int) -> None:
        """Holds so much from now on.

        Raises:
            OverloadedError: It is more than before, and there is not that much.
        """
        self._shares.change(amount - self._amount, self._caller)
        self._amount = amount

    def release(self) -> None:
        """Gives back what is held; a second time there is nothing to give."""
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
