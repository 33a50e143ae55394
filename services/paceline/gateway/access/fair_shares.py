"""Who sends requests, and bounded things that callers share: places for sessions, bytes being read, calls.

It knows neither HTTP nor gRPC, nor what is held. Doors set the caller of a task, and it is read where sessions are
made. Keys stay at the doors.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Self

from paceline.core.errors import OverloadedError

RETRY_AFTER_S = 1.0
# This part of a thing stays free for keys below their share, while there are others at all.
FREE_PART = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sent a request.

    Attributes:
        name: The API key's name; empty if the gateway asks for none.
        max_sessions: Most sessions of this caller at once; None: no limit of its own.
        num_keys: Callers that could exist, this one included.
        give_back: Takes back what the request has cost of the caller's rate; None: nothing.
    """

    name: str = ""
    max_sessions: int | None = None
    num_keys: int = 1
    give_back: Callable[[], Awaitable[None]] | None = field(default=None, compare=False, repr=False)


ANYONE = Caller()

_caller: ContextVar[Caller] = ContextVar("caller", default=ANYONE)


def current_caller() -> Caller:
    """Returns who sent the request that this task serves."""
    return _caller.get()


def become(caller: Caller) -> None:
    """Makes a caller the current one, for the rest of this task."""
    _caller.set(caller)


def fits(wanted: int, *, key: str, held: Mapping[str, int], num_keys: int, total: int) -> bool:
    """Whether a key may take more of a thing now: up to an equal share, beyond it while an eighth stays free.

    So greedy keys shrink to their share as they give things back, without anything being taken from them.

    Args:
        wanted: How much more.
        key: Name of the key that asks.
        held: What each key holds; a key that holds nothing may be left out.
        num_keys: Keys that could ask.
        total: All there is.
    """
    left = total - sum(held.values()) - wanted
    if left == total - wanted:
        # Of what is whole, anything fits: what is refused now would be refused for ever.
        return left >= 0
    num_holders = 1 + sum(1 for name, amount in held.items() if amount and name != key)
    # One part is that of the next key that asks.
    share = max(1, total // (num_holders + (num_keys > num_holders)))
    kept_free = -(-total // FREE_PART) if num_keys > 1 else 0
    return left >= (0 if held.get(key, 0) + wanted <= share else kept_free)


class Shares:
    """A bounded thing, shared by the callers as `fits` describes.

    Args:
        total: All there is.
        what: Its name in refusals, such as "bytes of requests being read".
    """

    def __init__(self, total: int, what: str) -> None:
        self.total = total
        self.what = what
        self._held: Counter[str] = Counter()
        # Set when something is given back, and another one then.
        self._freed = asyncio.Event()

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
            OverloadedError: There is not that much, or it is left to other callers.
        """
        held = Held(self, caller)
        held.resize(amount)
        return held

    async def wait(self, amount: int, caller: Caller) -> Held:
        """Holds an amount for a caller as soon as it is available; the caller bounds the time."""
        while not self._fits(amount, caller):
            await self._freed.wait()
        return self.take(amount, caller)

    async def emptied(self) -> None:
        """Returns once nobody holds anything."""
        while self.num_held:
            await self._freed.wait()

    def change(self, change: int, caller: Caller) -> None:
        """Takes more for a caller, or gives some of it back; raises as `take`."""
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
            freed, self._freed = self._freed, asyncio.Event()
            freed.set()

    def _fits(self, amount: int, caller: Caller) -> bool:
        return fits(amount, key=caller.name, held=self._held, num_keys=caller.num_keys, total=self.total)


class Held:
    """What a caller holds; a context manager that gives it back."""

    def __init__(self, shares: Shares, caller: Caller) -> None:
        self._shares = shares
        self._caller = caller
        self._amount = 0

    def resize(self, amount: int) -> None:
        """Holds another amount from now on; raises as `Shares.take` where it is more than before."""
        self._shares.change(amount - self._amount, self._caller)
        self._amount = amount

    def release(self) -> None:
        """Gives back what is held; a second call has no effect."""
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
