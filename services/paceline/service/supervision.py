"""Keeps the background tasks of a process running: a task that ends is restarted, and reported as failing.

It knows no particular task; what a task loses by a restart is its owner's concern.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from paceline.obs.metrics import Meter

# Starts a task's work, which should never return; called again for each restart.
Work = Callable[[], Coroutine[Any, Any, None]]

# A restarted task that has run this long counts as healthy.
SETTLED_S = 10.0
# A task that has not ended this long after a cancellation is cancelled again.
CANCEL_AGAIN_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """How long to wait before a restart: doubling, bounded, forgotten after a long life."""

    first_s: float = 0.5
    most_s: float = 30.0
    reset_after_s: float = 60.0

    def delay_s(self, previous_s: float | None, alive_s: float) -> float:
        """Returns the next delay.

        Args:
            previous_s: Delay before the life that has just ended; None: it was the first life.
            alive_s: Length of that life.
        """
        if previous_s is None or alive_s >= self.reset_after_s:
            return self.first_s
        return min(self.most_s, 2 * previous_s)


# For what a step or a request may wait for.
QUICK = BackOff(first_s=0.1, most_s=5.0, reset_after_s=SETTLED_S)


class TaskSupervisor:
    """Starts background tasks again when they end, after a pause that grows from 0.1 to 5 s.

    Args:
        registry: Where restarts are counted.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        meaning = "Times that a background task ended and was started again, by its name."
        self._restarts = Meter(registry).counters("paceline:task_restarts", meaning, "task")
        self._clock = clock
        # When an ended task was restarted; infinity during its pause.
        self._lives_since_s: dict[str, float] = {}

    @property
    def failing(self) -> tuple[str, ...]:
        """Names of the tasks that ended and have not run for 10 s since."""
        now_s = self._clock()
        return tuple(sorted(name for name, since_s in self._lives_since_s.items() if now_s - since_s < SETTLED_S))

    @asynccontextmanager
    async def kept(self, tasks: Mapping[str, Work]) -> AsyncIterator[None]:
        """Keeps named tasks running while a block runs; they are cancelled at its end."""
        for name in tasks:
            self._restarts.labels(name)
        async with AsyncExitStack() as stack:
            for name, work in tasks.items():
                await stack.enter_async_context(_running(self._keep(name, work), name))
            yield

    async def _keep(self, name: str, work: Work) -> None:
        pause_s: float | None = None
        try:
            while True:
                started_s = self._clock()
                await _live(name, work)
                self._lives_since_s[name] = float("inf")
                self._restarts.labels(name).inc()
                pause_s = QUICK.delay_s(pause_s, self._clock() - started_s)
                await asyncio.sleep(pause_s)
                self._lives_since_s[name] = self._clock()
        finally:
            self._lives_since_s.pop(name, None)


async def _live(name: str, work: Work) -> None:
    """Runs a task until it ends by itself."""
    own = asyncio.current_task()
    assert own is not None, "coroutines run in tasks"
    try:
        await work()
        _log.error("a background task has ended and is started again", extra={"task": name})
    except BaseException as error:
        # A cancellation that was not for this task came from something that it waited for.
        if own.cancelling() or not isinstance(error, (Exception, asyncio.CancelledError)):
            raise
        _log.exception("a background task has failed and is started again", extra={"task": name})


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        # More than once: `asyncio.wait_for` before Python 3.12, and so a call to Redis, may lose a cancellation.
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
        if not task.cancelled():
            _log.debug("a background task ended with an error", exc_info=task.exception())
