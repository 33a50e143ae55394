"""Runs an engine in the process's event loop; its device alone has a thread.

A step is a coroutine: it plans, has the device compute, and emits the results. While the device computes, the loop
serves streams, and what arrives for the engine waits for the step's end: until then the engine is the device's.

A step that raises ends the engine loudly: every waiter gets the error. A step that does not return shows in
`Device.at_work` (`paceline.engine.watch`). The loop knows nothing of models, sessions or messages.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from paceline.core.errors import UnavailableError

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT", contravariant=True)
OutputT = TypeVar("OutputT", covariant=True)
_Event = TypeVar("_Event")
_Output = TypeVar("_Output")
_P = ParamSpec("_P")
_R = TypeVar("_R")

# Bytes of a peer's messages that wait for the end of a step before its stream is left unread. A drafter that sent
# messages of 16 MiB while a step ran would fill the memory.
PEER_BYTES = 8 * 1024 * 1024
# Time of events in a row before streams have a turn.
SLICE_S = 0.005
# Time for the step under way when an engine closes. Nobody watches for hangs by then, and the thread is a daemon.
CLOSE_S = 30.0


class Compute(Protocol):
    """Has a call made where the device is."""

    async def __call__(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R: ...


async def inline(call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
    """Computes in the calling thread."""
    return call(*args, **kwargs)


def run_sync(step: Coroutine[Any, Any, _R]) -> _R:
    """Runs a step that computes `inline` to its end, without an event loop."""
    while True:
        try:
            step.send(None)
        except StopIteration as end:
            result: _R = end.value
            return result


class Stepper(Protocol[EventT, OutputT]):
    """An engine, as its loop drives it."""

    def handle(self, event: EventT) -> None:
        """Handles one event, between two steps; must not raise for anything a peer can cause."""
        ...

    def has_work(self) -> bool:
        """True when a step would do something."""
        ...

    def patience_s(self) -> float:
        """Seconds for which waiting for events beats stepping now; 0: step."""
        ...

    async def step(self, compute: Compute = inline, tell: Callable[[OutputT], None] | None = None) -> OutputT:
        """Runs a step.

        Args:
            compute: Makes calls where the device is.
            tell: Sends results that others wait for before the step's end; None: the returned output has them.
        """
        ...


class Device:
    """The thread that computes, one call after the other. The model is made in it, and nobody else touches it.

    Args:
        name: Name of the thread, and in logs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._meanwhile: list[Callable[[], None]] = []
        self._inside = False
        self._since_s = 0.0
        self.num_calls = 0

    @property
    def at_work(self) -> int | None:
        """Number of the call that has not come back yet; None while it has nothing to do."""
        return self.num_calls if self._inside else None

    def call_s(self, now_s: float) -> float:
        """Seconds for which it has been inside the call that has not come back yet, at a monotonic time; 0: none."""
        return now_s - self._since_s if self._inside else 0.0

    def start(self) -> None:
        threading.Thread(target=self._work, name=self.name, daemon=True).start()

    async def run(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Makes a call in the thread."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_R] = loop.create_future()
        self.num_calls += 1
        self._inside, self._since_s = True, time.monotonic()
        waiting, self._meanwhile = self._meanwhile, []

        def answer() -> None:
            if waiting:
                # Now that it has the interpreter: it would wait for it behind them.
                loop.call_soon_threadsafe(_make_all, waiting)
            try:
                settle = partial(done.set_result, call(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - whoever waits gets it
                settle = partial(done.set_exception, _as_error(error))
            loop.call_soon_threadsafe(_settle, done, settle)

        self._calls.put(answer)
        try:
            return await done
        finally:
            self._inside = False

    def meanwhile(self, call: Callable[[], None]) -> None:
        """Has a call made in the event loop once the thread is at work, or at the next `rest`."""
        self._meanwhile.append(call)

    def rest(self) -> None:
        """Nothing is to be computed now."""
        waiting, self._meanwhile = self._meanwhile, []
        _make_all(waiting)

    def stop(self) -> None:
        """Ends the thread after the call under way."""
        self._calls.put(None)

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            call()


def _settle(done: asyncio.Future[Any], settle: Callable[[], None]) -> None:
    # The waiter may have been cancelled.
    if not done.done():
        settle()


def _as_error(error: BaseException) -> Exception:
    """Returns an error that a future can carry: StopIteration is refused, and others end or cancel the waiter."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"a call in the device's thread raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


def _make_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        try:
            call()
        except Exception:
            # Only this call's result is lost; the others and the engine go on.
            logger.exception("a call beside the device failed")


class EngineLoop(Generic[_Event, _Output]):
    """Drives a `Stepper`; belongs to one event loop.

    Args:
        make_stepper: Called in the device's thread, so that all torch objects are made there.
        deliver: Called with every output, at once.
        device: Where the stepper is made and computes.
    """

    def __init__(
        self, make_stepper: Callable[[], Stepper[_Event, _Output]], deliver: Callable[[_Output], None], device: Device
    ) -> None:
        self.device = device
        self._make_stepper = make_stepper
        self._deliver = deliver
        self._events: deque[_Event] = deque()
        # Bytes of those events, by the peers that they came from.
        self._bytes_of: Counter[Hashable] = Counter()
        self._arrived, self._taken = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Makes the stepper, and returns once it stands.

        Raises:
            Exception: The error raised while making the stepper.
        """
        self.device.start()
        stepper = await self.device.run(self._make_stepper)
        self._running = asyncio.create_task(self._run(stepper), name=f"engine {self.device.name}")

    def post(self, event: _Event) -> None:
        """Hands the engine an event.

        Raises:
            UnavailableError: The engine has ended.
        """
        if self._closing:
            raise UnavailableError("the engine has stopped")
        self._events.append(event)
        self._arrived.set()

    def withdraw(self, matches: Callable[[_Event], bool]) -> list[_Event]:
        """Takes back events that still wait for the step's end; returns them."""
        taken = [event for event in self._events if matches(event)]
        if taken:
            self._events = deque(event for event in self._events if not matches(event))
        return taken

    async def post_from(self, peer: Hashable, event: _Event, num_bytes: int) -> None:
        """Hands over what a peer has sent, once no more than `PEER_BYTES` of it wait.

        Raises:
            UnavailableError: The engine has ended.
        """
        while self._bytes_of[peer] and self._bytes_of[peer] + num_bytes > PEER_BYTES:
            await self._taken.wait()
        self.post(event)
        self._bytes_of[peer] += num_bytes

    async def ended(self) -> None:
        """Waits until the engine ends.

        Raises:
            Exception: The error that broke the engine; nothing after `close`.
        """
        assert self._running is not None, "start() comes first"
        await asyncio.shield(self._running)

    async def close(self) -> None:
        """Ends the engine after the step under way; events not yet handled are dropped."""
        self._closing = True
        self._arrived.set()
        if self._running is not None:
            _, late = await asyncio.wait({self._running}, timeout=CLOSE_S)
            if late:
                logger.error("engine %s is still in a step after %g s; it is left behind", self.device.name, CLOSE_S)
        self.device.stop()

    async def _run(self, stepper: Stepper[_Event, _Output]) -> None:
        try:
            while not self._closing:
                await self._advance(stepper)
        except Exception:
            logger.exception("engine %s died", self.device.name)
            raise
        finally:
            self._closing = True
            self._take()
            self.device.rest()

    async def _advance(self, stepper: Stepper[_Event, _Output]) -> None:
        begun_s = time.monotonic()
        for event in self._take():
            stepper.handle(event)
            # Sessions with long prompts take milliseconds each; streams, and other waiters, have their turn.
            if time.monotonic() - begun_s > SLICE_S:
                await asyncio.sleep(0)
                begun_s = time.monotonic()
        patience_s = stepper.patience_s() if stepper.has_work() else None
        if patience_s is not None and patience_s <= 0.0:
            self._deliver(await stepper.step(self.device.run, self._deliver))
            # Streams write what was delivered, and what has arrived meanwhile is taken before the next step.
            await asyncio.sleep(0)
            return
        self.device.rest()
        if patience_s is None:
            await self._arrived.wait()
            return
        # Timers of uvloop count whole milliseconds, and one of none would keep the loop spinning.
        wait_s = math.ceil(1e3 * patience_s) / 1e3
        timer = asyncio.get_running_loop().call_later(wait_s, self._arrived.set)
        await self._arrived.wait()
        timer.cancel()

    def _take(self) -> list[_Event]:
        """Returns all arrived events; senders that wait to hand over more go on."""
        events = [*self._events]
        self._events.clear()
        self._bytes_of.clear()
        self._arrived.clear()
        self._taken.set()
        self._taken = asyncio.Event()
        return events
