"""Connects the event loop and the thread that owns torch; nothing else crosses between them.

Events go in through a bounded inbox; outputs come back once per step, and before one that has something to send first.
Both threads share one interpreter, so what a step has done is handed on once the next one is planned: the event loop
then works while the device does. It is handed on at once where no step follows, and what peers of ours wait for is
handed on in the middle of a step (`EngineThread.tell`).

A step that raises ends the engine loudly: every waiter gets the error. One that does not return shows in `at_work`
(`paceline.model_service` watches it). The bridge knows nothing of models, sessions or messages.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, Protocol, TypeVar

from paceline.core.errors import OverloadedError, UnavailableError

logger = logging.getLogger(__name__)

EventT = TypeVar("EventT", contravariant=True)
OutputT = TypeVar("OutputT", covariant=True)
_Event = TypeVar("_Event")
_Output = TypeVar("_Output")
_P = ParamSpec("_P")
_R = TypeVar("_R")

# Far beyond what peers with bounded streams can have under way; an inbox that is full means that the engine hangs.
INBOX_LIMIT = 65_536
# Bytes of a peer's messages that wait for the end of a step before its stream is left unread. A drafter that sent
# messages of 16 MiB while a step ran would fill the memory.
PEER_BYTES = 8 * 1024 * 1024
# Longest pause of the engine for an event loop that does not come to what cannot wait.
HAND_OVER_S = 0.001


class Stepper(Protocol[EventT, OutputT]):
    """What the engine thread drives."""

    def handle(self, event: EventT) -> None:
        """Handles one event; must not raise for anything a peer can cause."""
        ...

    def has_work(self) -> bool:
        """True when a step would do something."""
        ...

    def patience_s(self) -> float:
        """Seconds for which waiting for events beats stepping now; 0: step."""
        ...

    def begin(self) -> OutputT | None:
        """What goes out before the next step runs, if anything; `step` follows, with no event between them."""
        ...

    def step(self, tell: Callable[[OutputT], None] | None = None) -> OutputT:
        """Runs a step; `tell` hands on what others wait for before its end."""
        ...


class EngineThread(Generic[_Event, _Output]):
    """Runs a `Stepper` in a thread of its own.

    Args:
        make_stepper: Called inside the thread, so that everything torch lives there.
        deliver: Called in the event loop with every output.
        name: Shown in thread lists and logs.
    """

    def __init__(
        self,
        make_stepper: Callable[[], Stepper[_Event, _Output]],
        deliver: Callable[[_Output], None],
        name: str,
    ) -> None:
        self._make_stepper = make_stepper
        self._deliver = deliver
        self._inbox: deque[_Event] = deque()
        # Of the events in the inbox, by the peers that they came from; and those who wait to hand over more.
        self._bytes_of: Counter[Hashable] = Counter()
        self._held_up: list[asyncio.Future[None]] = []
        # What steps have done that is not handed on yet.
        self._outputs: list[_Output] = []
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._num_calls = 0
        self._inside = False

    @property
    def num_calls(self) -> int:
        """Calls of the stepper so far; while the number grows the engine makes progress."""
        return self._num_calls

    @property
    def at_work(self) -> int | None:
        """Number of the call of the stepper that has not come back yet; None while the engine waits for events."""
        return self._num_calls if self._inside else None

    async def start(self) -> None:
        """Starts the thread and returns once the stepper stands.

        Raises:
            Exception: Whatever making the stepper raised.
        """
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._ended = self._loop.create_future()
        self._thread.start()
        await self._ready

    def post(self, event: _Event, *, always: bool = False) -> None:
        """Hands an event to the thread; safe from any thread, never blocks.

        Args:
            always: Take it even when the inbox is full; for events that end or undo something.

        Raises:
            UnavailableError: The engine has ended.
            OverloadedError: The inbox is full.
        """
        with self._wake:
            self._post(event, always=always)

    async def post_from(self, peer: Hashable, event: _Event, num_bytes: int) -> None:
        """Hands over what a peer has sent, once no more than `PEER_BYTES` of it wait; belongs to the event loop.

        Raises:
            UnavailableError: The engine has ended.
            OverloadedError: The inbox is full.
        """
        while True:
            with self._wake:
                self._check_open()
                waiting = self._bytes_of[peer]
                if not waiting or waiting + num_bytes <= PEER_BYTES:
                    self._post(event)
                    self._bytes_of[peer] = waiting + num_bytes
                    return
                taken = asyncio.get_running_loop().create_future()
                self._held_up.append(taken)
            await taken

    def _check_open(self) -> None:
        if self._closing or (self._ended is not None and self._ended.done()):
            raise UnavailableError("the engine has stopped")

    def _post(self, event: _Event, *, always: bool = False) -> None:
        self._check_open()
        if len(self._inbox) >= INBOX_LIMIT and not always:
            raise OverloadedError("the engine's inbox is full", retry_after_s=1.0)
        self._inbox.append(event)
        self._wake.notify()

    async def ended(self) -> None:
        """Waits until the engine ends.

        Raises:
            Exception: What broke the engine; nothing after `close`.
        """
        assert self._ended is not None, "start() comes first"
        await asyncio.shield(self._ended)

    async def close(self) -> None:
        """Ends the thread after the step under way; events not yet handled are dropped."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            stepper = self._make_stepper()
        except BaseException as error:  # noqa: BLE001 - the waiter in start() must learn of every failure
            self._settle(self._ready, error)
            return
        self._settle(self._ready, None)
        try:
            try:
                self._drive(stepper)
            finally:
                self._post_outputs()
                # Whoever is held up learns of the end, and nobody comes after.
                with self._wake:
                    self._closing = True
                self._take(0.0)
        except BaseException as error:
            logger.exception("engine %s died", self._thread.name)
            self._settle(self._ended, error)
        else:
            self._settle(self._ended, None)

    def _drive(self, stepper: Stepper[_Event, _Output]) -> None:
        patience_s: float | None = 0.0
        while True:
            if patience_s is None or patience_s > 0.0:
                self._post_outputs()
            for event in self._take(patience_s):
                self._call(stepper.handle, event)
            if self._closing:
                return
            patience_s = stepper.patience_s() if stepper.has_work() else None
            if patience_s is not None and patience_s <= 0.0:
                early = self._call(stepper.begin)
                if early is not None:
                    self._outputs.append(early)
                self._post_outputs()
                self._outputs.append(self._call(stepper.step, self.tell))

    def _call(self, call: Callable[_P, _R], *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Makes a call of the stepper that is seen from outside until it comes back."""
        self._num_calls += 1
        self._inside = True
        try:
            return call(*args, **kwargs)
        finally:
            self._inside = False

    def tell(self, output: _Output) -> None:
        """Hands on an output in the middle of a step; belongs to the engine's thread.

        It pauses until the event loop has written it, or the loop would get the interpreter half a millisecond later.
        """
        assert self._loop is not None, "the thread starts after the loop is known"
        loop, written = self._loop, threading.Event()

        def hand_on() -> None:
            try:
                self._deliver(output)
            finally:
                # Streams that have something to send now write it first.
                loop.call_soon(written.set)

        loop.call_soon_threadsafe(hand_on)
        written.wait(HAND_OVER_S)

    def _take(self, timeout_s: float | None) -> list[_Event]:
        """Everything that has arrived; waits up to the timeout for the first event, None: without limit."""
        with self._wake:
            if not self._inbox and not self._closing and (timeout_s is None or timeout_s > 0):
                self._wake.wait(timeout_s)
            events = list(self._inbox)
            self._inbox.clear()
            self._bytes_of.clear()
            held_up, self._held_up = self._held_up, []
        for each in held_up:
            self._settle(each, None)
        return events

    def _post_outputs(self) -> None:
        assert self._loop is not None, "the thread starts after the loop is known"
        for output in self._outputs:
            self._loop.call_soon_threadsafe(self._deliver, output)
        self._outputs.clear()

    def _settle(self, future: asyncio.Future[None] | None, error: BaseException | None) -> None:
        assert self._loop is not None, "the thread starts after the loop is known"
        assert future is not None, "the futures are made in start()"

        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        self._loop.call_soon_threadsafe(settle)
