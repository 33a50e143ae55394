"""Bounded things that callers share, such as places for sessions, bytes being read or calls.

A caller may hold all of a thing while no other caller could want it, and a share of it otherwise. The module knows
neither HTTP nor gRPC, nor what is held.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Self

from paceline.core.errors import OverloadedError
from paceline.gateway.access.callers import Caller

RETRY_AFTER_S = 1.0
# At most this part of the places is kept free for keys that run nothing at the moment.
RESERVED_PART = 8


def fits(
    num_wanted: int, *, key: str, held: Mapping[str, int], num_keys: int, max_sessions: int, unit: int = 1
) -> bool:
    """Whether a key may take places now.

    With M places in all, h_k of them held by key k, F free ones, K keys that hold some or ask now, I = the keys that
    hold none and do not ask, and B = the keys other than k that hold less than their share:

        share   = max(1, M // (K + [I > 0]))      an equal part, one of them for the next key that asks
        reserve = min(B * unit, ceil(M / 8))      kept free for those below their share
        fits  <=>  n <= F  and  (h_k + n <= share  or  n <= F - reserve)

    So a key without rivals may take all places; rivals that want none cost it an eighth at most; and freed places go to
    the keys below their share first, whoever asks first: greedy keys shrink to it without any session being stopped.

    Args:
        num_wanted: n, the places of one request.
        key: Name of the key that asks.
        held: Places held by each key; a key that holds none may be left out.
        num_keys: Keys that could ask.
        max_sessions: M.
        unit: Places that one request takes at most, where these are bytes.
    """
    num_free = max_sessions - sum(held.values())
    rivals = [count for name, count in held.items() if count and name != key]
    num_idle = max(0, num_keys - len(rivals) - 1)
    share = max(1, max_sessions // (1 + len(rivals) + (num_idle > 0)))
    num_below = num_idle + sum(count < share for count in rivals)
    reserve = min(num_below * unit, -(-max_sessions // RESERVED_PART))
    within_share = held.get(key, 0) + num_wanted <= share
    return num_wanted <= num_free and (within_share or num_wanted <= num_free - reserve)


class Shares:
    """A bounded thing, shared by the callers as `fits` describes.

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
        """The amount that all callers hold together."""
        return self._held.total()

    def held_by(self, caller: Caller) -> int:
        """Returns the amount that a caller holds."""
        return self._held[caller.name]

    def take(self, amount: int, caller: Caller) -> Held:
        """Holds an amount for a caller.

        Raises:
            OverloadedError: There is not that much, or it is reserved for other callers.
        """
        held = Held(self, caller)
        held.resize(amount)
        return held

    async def wait(self, amount: int, caller: Caller) -> Held:
        """Holds an amount for a caller as soon as it is available; the caller bounds the time."""
        await self._until(lambda: self._fits(amount, caller))
        return self.take(amount, caller)

    async def emptied(self) -> None:
        """Returns once nobody holds anything."""
        await self._until(lambda: not self.num_held)

    async def _until(self, true: Callable[[], bool]) -> None:
        freed = asyncio.Event()
        self._freed.add(freed)
        try:
            while not true():
                freed.clear()
                await freed.wait()
        finally:
            self._freed.discard(freed)

    def change(self, change: int, caller: Caller) -> None:
        """Takes more for a caller, or gives some of it back.

        Raises:
            OverloadedError: There is not that much, or it is reserved for other callers.
        """
        if change > 0 and not self._fits(change, caller):
            problem = f"{self.num_held} of {self.total} {self.what} are taken, {change} more were asked for"
            if self.num_held + change <= self.total:
                mine = f"API key {caller.name!r} has {self.held_by(caller)}"
                problem += f"; {mine}, and what is left is reserved for other keys"
            raise OverloadedError(problem, retry_after_s=RETRY_AFTER_S)
        self._held[caller.name] += change
        if change < 0:
            # Callers come and go; those that hold nothing are forgotten.
            self._held += Counter()
            for freed in self._freed:
                freed.set()

    def _fits(self, amount: int, caller: Caller) -> bool:
        return fits(
            amount,
            key=caller.name,
            held=self._held,
            num_keys=caller.num_keys,
            max_sessions=self.total,
            unit=self._unit,
        )


class Held:
    """What a caller holds; a context manager that gives it back."""

    def __init__(self, shares: Shares, caller: Caller) -> None:
        self._shares = shares
        self._caller = caller
        self._amount = 0

    def resize(self, amount: int) -> None:
        """Holds another amount from now on.

        Raises:
            OverloadedError: It is more than before, and there is not that much.
        """
        self._shares.change(amount - self._amount, self._caller)
        self._amount = amount

    def release(self) -> None:
        """Gives back what is held; a second call has no effect."""
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
