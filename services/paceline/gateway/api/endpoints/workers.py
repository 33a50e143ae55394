"""Threads for work that takes long without waiting: reading large bodies, templates, tokenizing, compiling grammars.

There are few of them, so that the event loop gets the interpreter back soon; further requests wait in bounded queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Self, TypeVar

from paceline.gateway.access.callers import current_caller
from paceline.gateway.access.fair_shares import Shares

NUM_THREADS = 2
MAX_JOBS = 64
# Larger requests are read in a thread, so that no stream waits for a tokenizer.
MAX_INLINE_BYTES = 4 * 1024

ResultT = TypeVar("ResultT")


class _Pool:
    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="reader")
        self.jobs = Shares(MAX_JOBS, "requests being read")


class Workers:
    """Runs functions of requests; a context manager that ends the threads.

    Grammars have threads of their own, so that no other request waits for them.
    """

    def __init__(self) -> None:
        """Starts no thread yet."""
        self._reading, self._compiling = _Pool(), _Pool()

    async def run(self, function: Callable[[], ResultT], *, small: bool, compiles: bool = False) -> ResultT:
        """Returns the result of a function, in a thread unless it is quick; either way in the request's context.

        Args:
            function: Reads a request, or a part of it.
            small: Whether it reads so little that no thread is needed.
            compiles: Whether it may compile a grammar.

        Raises:
            OverloadedError: Too many requests wait already.
        """
        if small and not compiles:
            return function()
        pool = self._compiling if compiles else self._reading
        with pool.jobs.take(1, current_caller()):
            return await asyncio.wrap_future(pool.executor.submit(copy_context().run, function))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._reading, self._compiling):
            pool.executor.shutdown(wait=False, cancel_futures=True)
