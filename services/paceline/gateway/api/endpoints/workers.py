"""Threads for work that takes long without waiting: reading large bodies, templates, tokenizing.

There are few of them, so that the event loop gets the interpreter back soon; further requests wait in bounded queues,
and callers share the threads' time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self, TypeVar

from paceline.gateway.access.fair_shares import current_caller
from paceline.service.fair_threads import FairThreads

NUM_THREADS = 2
MAX_WAITING, LONGEST_WAIT_S = 64, 30.0
# Larger requests are read in a thread, so that no stream waits for a tokenizer.
MAX_INLINE_BYTES = 4 * 1024

ResultT = TypeVar("ResultT")


class Workers:
    """Runs functions of requests; a context manager that ends the threads."""

    def __init__(self) -> None:
        self._reading = FairThreads(
            NUM_THREADS, "requests being read", most_waiting=MAX_WAITING, longest_wait_s=LONGEST_WAIT_S
        )

    async def run(self, function: Callable[[], ResultT], *, small: bool) -> ResultT:
        """Returns the result of a function, in a thread unless it is quick; either way in the request's context.

        Args:
            function: Reads a request, or a part of it.
            small: Whether it reads so little that no thread is needed.

        Raises:
            OverloadedError: Too many requests wait, or this one has waited too long.
        """
        if small:
            return function()
        return await self._reading.run(function, current_caller().name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.close()
