"""Threads for what takes long without waiting: reading large bodies, templates, tokenizing.

A few, so that the event loop gets the interpreter back soon; requests beyond wait in a bounded queue.
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

ResultT = TypeVar("ResultT")


class Workers:
    """Runs functions in threads; a context manager that ends them."""

    def __init__(self, num_threads: int = NUM_THREADS, max_jobs: int = MAX_JOBS) -> None:
        """Starts no thread yet.

        Args:
            num_threads: Functions that run at once.
            max_jobs: Those and the ones that wait, of all callers.
        """
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="reader")
        self._jobs = Shares(max_jobs, "requests being read")

    async def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Returns what a function returns that runs in a thread, in the context of the request.

        Raises:
            OverloadedError: Too many wait already.
        """
        with self._jobs.take(1, current_caller()):
            return await asyncio.wrap_future(self._executor.submit(copy_context().run, function))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
