"""Threads whose time is shared fairly by those whose work they do, such as tenants.

Work waits in the queue of its owner. A free thread takes the oldest work of the owner that has used the least time of
late, so heavy work delays its own owner and nobody else. The module knows no particular work.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

from paceline.core.errors import OverloadedError

ResultT = TypeVar("ResultT")

RETRY_AFTER_S = 1.0
# Time used is forgotten with this half-life; an owner with less than this is as good as new.
HALF_LIFE_S, NOTHING_S = 60.0, 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A function that waits or runs; its caller awaits `done`."""

    function: Callable[[], Any]
    context: Context
    done: asyncio.Future[Any]


@dataclass(slots=True)
class _Owner:
    """The work of one owner: what waits, oldest first, what runs, and the seconds used as of a time."""

    waiting: deque[_Job] = field(default_factory=deque)
    num_running: int = 0
    used_s: float = 0.0
    as_of_s: float = 0.0

    def use(self, seconds: float, now_s: float) -> float:
        """Adds to the time used; returns what is left of it by now."""
        self.used_s = self.used_s * 0.5 ** ((now_s - self.as_of_s) / HALF_LIFE_S) + seconds
        self.as_of_s = now_s
        return self.used_s


class FairThreads:
    """Runs functions in threads; belongs to one event loop.

    Args:
        num_threads: How many run at once.
        what: The work, for refusals and names of threads.
        most_waiting: Most functions that wait, of all owners together.
        longest_wait_s: Longest time that a function waits, in seconds.
        niceness: Of the threads, beside the process's own: on a busy machine they yield to the others.
    """

    def __init__(
        self,
        num_threads: int,
        what: str,
        *,
        most_waiting: int,
        longest_wait_s: float,
        niceness: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        begin = partial(_be_nice, niceness)
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=what, initializer=begin)
        self._what = what
        self._num_free = num_threads
        self._most_waiting = most_waiting
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._owners: dict[str, _Owner] = {}

    async def run(self, function: Callable[[], ResultT], owner: str) -> ResultT:
        """Returns the result of a function, which runs in the caller's context.

        A caller that leaves gives up its place in the queue; a function that has begun runs to its end.

        Raises:
            OverloadedError: Too many functions wait, or this one has waited too long.
        """
        loop = asyncio.get_running_loop()
        job = _Job(function=function, context=copy_context(), done=loop.create_future())
        mine = self._owners.setdefault(owner, _Owner(as_of_s=self._clock()))
        self._make_room(mine)
        mine.waiting.append(job)
        self._next()
        too_late = f"it has waited for {self._longest_wait_s:g} s"
        timer = loop.call_later(self._longest_wait_s, self._refuse_waiting, mine, job, too_late)
        try:
            return cast(ResultT, await job.done)
        finally:
            timer.cancel()
            if job in mine.waiting:
                mine.waiting.remove(job)

    def close(self) -> None:
        """Begins nothing any more; functions that have begun run on."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _make_room(self, mine: _Owner) -> None:
        """Refuses somebody if the queues are full: the newest work of the owner that has most of it waiting."""
        if sum(len(each.waiting) for each in self._owners.values()) < self._most_waiting:
            return
        longest = max(self._owners.values(), key=lambda each: len(each.waiting))
        full = f"{self._most_waiting} wait already"
        if len(longest.waiting) <= len(mine.waiting) + 1:
            raise self._overloaded(full)
        self._refuse_waiting(longest, longest.waiting[-1], full)

    def _refuse_waiting(self, owner: _Owner, job: _Job, why: str) -> None:
        if job in owner.waiting:
            owner.waiting.remove(job)
            if not job.done.done():
                job.done.set_exception(self._overloaded(why))

    def _overloaded(self, why: str) -> OverloadedError:
        return OverloadedError(f"{self._what}: {why}", retry_after_s=RETRY_AFTER_S)

    def _next(self) -> None:
        now_s = self._clock()
        while self._num_free and (waiting := [each for each in self._owners.values() if each.waiting]):
            owner = min(waiting, key=lambda each: (each.use(0.0, now_s), each.num_running))
            job = owner.waiting.popleft()
            if not job.done.done():
                self._begin(owner, job, now_s)

    def _begin(self, owner: _Owner, job: _Job, now_s: float) -> None:
        self._num_free -= 1
        owner.num_running += 1
        working = self._executor.submit(job.context.run, job.function)
        loop, ended = asyncio.get_running_loop(), partial(self._ended, owner, job, now_s)
        working.add_done_callback(lambda done: loop.call_soon_threadsafe(ended, done))

    def _ended(self, owner: _Owner, job: _Job, begun_s: float, working: Future[Any]) -> None:
        now_s = self._clock()
        owner.use(now_s - begun_s, now_s)
        owner.num_running -= 1
        self._num_free += 1
        if not job.done.done():
            _hand_over(working, job.done)
        self._next()
        idle = [name for name, each in self._owners.items() if not each.waiting and not each.num_running]
        for name in idle:
            if self._owners[name].use(0.0, now_s) < NOTHING_S:
                del self._owners[name]


def _be_nice(niceness: int) -> None:
    """Lowers the priority of the calling thread, which Linux has for each; elsewhere it may be the whole process's."""
    if niceness and sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, 0)
        # A sandbox may refuse.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + niceness)


def _hand_over(working: Future[Any], done: asyncio.Future[Any]) -> None:
    if working.cancelled():
        done.cancel()
    elif (error := working.exception()) is not None:
        done.set_exception(error)
    else:
        done.set_result(working.result())
