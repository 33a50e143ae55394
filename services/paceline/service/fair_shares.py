"""Callers, and bounded resources that they share: places for sessions, bytes being read, calls, threads.

It knows neither HTTP nor gRPC, nor what is held. Doors set the caller of a task, and it is read where sessions are
made. Keys stay at the doors.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, Self, TypeVar

from paceline.core.errors import OverloadedError

ResultT = TypeVar("ResultT")
HolderT = TypeVar("HolderT")

RETRY_AFTER_S = 1.0
# This part of a thing stays free for keys below their share, while there are others at all.
FREE_PART = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request.

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


def set_current_caller(caller: Caller) -> None:
    """Makes a caller the current one, for the rest of this task."""
    _caller.set(caller)


def may_take(wanted: int, *, key: str, held: Mapping[str, int], num_keys: int, total: int) -> bool:
    """Whether a key may take more of a thing now: up to an equal share, beyond it while an eighth stays free.

    So greedy keys shrink to their share as they give things back, without anything being taken from them.

    Args:
        wanted: How much more.
        key: Name of the key that asks.
        held: Amount held by each key; a key that holds nothing may be left out.
        num_keys: Keys that could ask.
        total: All there is.
    """
    left = total - sum(held.values()) - wanted
    if left == total - wanted:
        # Nothing is held, so any amount fits: a refusal now would be a refusal for ever.
        return left >= 0
    num_holders = 1 + sum(1 for name, amount in held.items() if amount and name != key)
    # Reserves a part for the next key that asks.
    share = max(1, total // (num_holders + (num_keys > num_holders)))
    kept_free = -(-total // FREE_PART) if num_keys > 1 else 0
    return left >= (0 if held.get(key, 0) + wanted <= share else kept_free)


class Shares:
    """A bounded thing, shared by the callers as `may_take` describes; belongs to one event loop.

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
        # By the names of callers: what waits, and the number of the last turn since somebody has been waiting.
        self._waiting: dict[str, deque[_Turn]] = {}
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0

    @property
    def num_held(self) -> int:
        """The amount that all callers hold together."""
        return self._held.total()

    def held_by(self, caller: Caller) -> int:
        """Returns the amount that a caller holds."""
        return self._held[caller.name]

    def take(self, amount: int, caller: Caller) -> Lease:
        """Holds an amount for a caller.

        Raises:
            OverloadedError: There is not that much, or it is left to other callers.
        """
        held = Lease(self, caller)
        held.resize(amount)
        return held

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
            self._serve()
            if not self._waiting:
                # A caller that comes back while others wait keeps its place behind them.
                self._last_turns.clear()

    async def wait(self, amount: int, held: Lease) -> None:
        """Returns once it is a caller's turn and so much more is held for it."""
        turn = _Turn(amount, held, asyncio.get_running_loop().create_future())
        mine = self._waiting.setdefault(held.caller.name, deque())
        mine.append(turn)
        self._serve()
        try:
            await turn.come
        finally:
            if turn in mine:
                mine.remove(turn)
                if not mine:
                    del self._waiting[held.caller.name]
                self._serve()

    def _serve(self) -> None:
        """Serves those that wait as long as there is enough: first whose last turn is longest ago, each its oldest."""
        while (turn := self._next_turn()) is not None:
            name = turn.held.caller.name
            self._waiting[name].popleft()
            if not self._waiting[name]:
                del self._waiting[name]
            if not turn.come.done():
                self._num_turns += 1
                self._last_turns[name] = self._num_turns
                turn.held.grow(turn.amount)
                turn.come.set_result(None)

    def _next_turn(self) -> _Turn | None:
        for name in sorted(self._waiting, key=lambda each: self._last_turns.get(each, 0)):
            turn = self._waiting[name][0]
            if turn.come.done() or self._fits(turn.amount, turn.held.caller):
                return turn
        return None

    def _fits(self, amount: int, caller: Caller) -> bool:
        return may_take(amount, key=caller.name, held=self._held, num_keys=caller.num_keys, total=self.total)


class _Turn(NamedTuple):
    """An amount that is waited for."""

    amount: int
    held: Lease
    come: asyncio.Future[None]


class Lease:
    """A caller's holding; a context manager that gives it back."""

    def __init__(self, shares: Shares, caller: Caller) -> None:
        self.caller = caller
        self._shares = shares
        self._amount = 0

    def grow(self, amount: int) -> None:
        """Holds so much more; raises as `Shares.take`."""
        self.resize(self._amount + amount)

    def resize(self, amount: int) -> None:
        """Holds another amount from now on; raises as `Shares.take` where it is more than before."""
        self._shares.change(amount - self._amount, self.caller)
        self._amount = amount

    async def wait(self, amount: int) -> None:
        """Holds so much more as soon as it is its caller's turn; who waits bounds the time."""
        await self._shares.wait(amount, self)

    def release(self) -> None:
        """Gives back what is held; a second call has no effect."""
        self.resize(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class FairThreads:
    """Threads that run functions of callers, who take turns: heavy work delays its own caller.

    Args:
        num_threads: How many run at once.
        what: The work, for refusals and names of threads.
        longest_wait_s: Longest time that a function waits, in seconds.
        niceness: Niceness of the threads, beside the process's own: on a busy machine they yield to the others.
    """

    def __init__(self, num_threads: int, what: str, *, longest_wait_s: float, niceness: int = 0) -> None:
        begin = partial(_be_nice, niceness)
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=what, initializer=begin)
        self._threads = Shares(num_threads, what)
        self._longest_wait_s = longest_wait_s

    async def run(self, function: Callable[[], ResultT], owner: str) -> ResultT:
        """Returns the result of a function, which runs in the caller's context; one that has begun runs to its end.

        Raises:
            OverloadedError: It has waited too long.
        """
        # A single caller may have all threads: others come next.
        lease = self._threads.take(0, Caller(name=owner))
        try:
            async with asyncio.timeout(self._longest_wait_s):
                await lease.wait(1)
        except (TimeoutError, asyncio.CancelledError) as error:
            # Its turn may have come at the same moment.
            lease.release()
            if isinstance(error, TimeoutError):
                problem = f"{self._threads.what}: it has waited for {self._longest_wait_s:g} s"
                raise OverloadedError(problem, retry_after_s=RETRY_AFTER_S) from None
            raise
        loop = asyncio.get_running_loop()
        working = self._executor.submit(copy_context().run, function)
        # Its thread is taken until the function ends, also when the caller leaves before.
        working.add_done_callback(lambda _: loop.call_soon_threadsafe(lease.release))
        return await asyncio.wrap_future(working)

    def close(self) -> None:
        """Begins nothing any more; functions that have begun run on."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _be_nice(niceness: int) -> None:
    """Lowers the priority of the calling thread, which Linux has for each; elsewhere it may be the whole process's."""
    if niceness and sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, 0)
        # A sandbox may refuse.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + niceness)


class EvictingLimit(Generic[HolderT]):
    """A limited number of holders without a key: one more ends the one that was used longest ago.

    Args:
        limit: How many.
        end: Ends a holder.
        is_idle: Whether a holder may be ended for another.
    """

    def __init__(
        self, limit: int, end: Callable[[HolderT], None], is_idle: Callable[[HolderT], bool] = lambda _: True
    ) -> None:
        self.limit = limit
        self._end = end
        self._is_idle = is_idle
        # The one that was used last is the last.
        self._all: dict[HolderT, None] = {}

    def add(self, holder: HolderT) -> None:
        """Takes one more; it is ended itself if no other may be."""
        if len(self._all) >= self.limit:
            eldest = next(filter(self._is_idle, self._all), holder)
            self.remove(eldest)
            self._end(eldest)
        self._all[holder] = None

    def note_use(self, holder: HolderT) -> None:
        """Notes that a holder was used just now."""
        if holder in self._all:
            del self._all[holder]
            self._all[holder] = None

    def remove(self, holder: HolderT) -> None:
        """Forgets one."""
        self._all.pop(holder, None)
