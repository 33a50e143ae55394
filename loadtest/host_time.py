"""Simulated devices whose processes have a core each: what a process computes for a step takes its time there, too.

The planner's simulation runs the engines as they serve, in one thread, on a clock that jumps; code costs nothing. Here
each engine's clock also moves by the CPU time that its own code takes: events, plan, rows, verdicts, commits. Gateways,
messages between processes and the computing of simulated models are left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from paceline.engine.batch import Batch
from paceline.planning.engines import DeviceAtWork, JumpingLoop
from paceline.simulated.device import Pace
from paceline.simulated.profile import DeviceFacts

_P = ParamSpec("_P")
_Result = TypeVar("_Result")


class ChargedDevice(DeviceAtWork):
    """A device, and the core of its engine."""

    def __init__(self, loop: JumpingLoop) -> None:
        super().__init__(loop)
        loop.set_task_factory(_timed_task)
        self._host_s, self._since_s = 0.0, 0.0

    def start(self) -> None:
        """The task that is made next is the engine's."""
        _DEVICE.set(self)
        self.resume()

    def resume(self) -> None:
        """The engine's code goes on."""
        self._since_s = time.thread_time()

    def pause(self) -> None:
        """The engine's code waits for something."""
        self._host_s += time.thread_time() - self._since_s

    def pace(self, facts: DeviceFacts, seed: int, overhead: float = 0.0) -> Pace:
        return _ChargedPace(self, facts, seed=seed, overhead=overhead, clock=self.now_s, sleep=self._sleep)

    def leave_out(self, seconds: float) -> None:
        """Does not count time that simulated models have computed."""
        self._since_s += seconds

    async def run(self, call: Callable[_P, _Result], *args: _P.args, **kwargs: _P.kwargs) -> _Result:
        def charged() -> _Result:
            result = call(*args, **kwargs)
            self.pause()
            self.resume()
            host_s, self._host_s = self._host_s, 0.0
            self._sleep(host_s)
            return result

        return await super().run(charged)


class _ChargedPace(Pace):
    """Leaves out what a simulated model computes between the start of a step and its end."""

    def __init__(self, device: ChargedDevice, facts: DeviceFacts, **settings: Any) -> None:
        super().__init__(facts, **settings)
        self._device, self._began_s = device, 0.0

    def now_s(self) -> float:
        self._began_s = time.thread_time()
        return super().now_s()

    def keep(self, started_s: float, *batches: Batch) -> None:
        self._device.leave_out(time.thread_time() - self._began_s)
        super().keep(started_s, *batches)


_DEVICE: ContextVar[ChargedDevice | None] = ContextVar("device", default=None)


class _Timed(Coroutine[Any, Any, _Result]):
    """A coroutine that tells the device of its engine when its code runs."""

    def __init__(self, work: Coroutine[Any, Any, _Result]) -> None:
        self._work = work

    def send(self, value: Any) -> Any:
        if (device := _DEVICE.get()) is None:
            return self._work.send(value)
        device.resume()
        try:
            return self._work.send(value)
        finally:
            device.pause()

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, _Result]:
        return self._work.__await__()


def _timed_task(loop: asyncio.AbstractEventLoop, work: Any, **settings: Any) -> Any:
    return asyncio.Task(_Timed(work), loop=loop, **settings)
