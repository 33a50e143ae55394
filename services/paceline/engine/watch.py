"""Watches that a device returns from its calls, and that the event loop comes round; shows what else they do.

A thread that hangs cannot be ended; its process can. `paceline.model_service` does that.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from paceline.engine.loop import Device

# Looks within the bound; so late, at most, is a hang found.
LOOKS = 20
# A call that is inside the device for less time is nothing to write down.
LEAST_TICK_S = 0.05


@dataclass(slots=True)
class Stall:
    """For how long a device, or an event loop, has been inside the same call.

    Time between looks beyond two ticks does not count: then the whole process was frozen, not its device alone.

    Attributes:
        tick_s: Time between two looks.
        call: The call seen last.
        stuck_s: Time since it was first seen.
    """

    tick_s: float
    call: int | None = None
    stuck_s: float = 0.0
    _looked_s: float = 0.0

    def look(self, call: int | None, now_s: float) -> float:
        """Notes what it does now.

        Returns:
            Seconds for which it has been inside that call; 0.0 where it waits.
        """
        same = call is not None and call == self.call
        self.stuck_s = self.stuck_s + min(now_s - self._looked_s, 2 * self.tick_s) if same else 0.0
        self.call, self._looked_s = call, now_s
        return self.stuck_s


async def until_hung(device: Device, bound_s: Callable[[], float], stalled: Callable[[float], None]) -> float:
    """Returns once the device has been inside one call for longer than a bound, with the seconds it has been.

    Args:
        bound_s: Seconds; follows what the engine learns of its steps.
        stalled: Called in another thread once the event loop has not come round for as long.
    """
    tick_s, over, turns = max(LEAST_TICK_S, bound_s() / LOOKS), threading.Event(), 0

    def watch_loop() -> None:
        stall = Stall(tick_s)
        while not over.wait(tick_s):
            if (stuck_s := stall.look(turns, time.monotonic())) > bound_s():
                stalled(stuck_s)
                return

    threading.Thread(target=watch_loop, name="watch the event loop", daemon=True).start()
    stall = Stall(tick_s)
    try:
        while (stuck_s := stall.look(device.at_work, time.monotonic())) <= bound_s():
            turns += 1
            await asyncio.sleep(tick_s)
    finally:
        over.set()
    return stuck_s


def stacks() -> str:
    """Returns what all threads are doing, as tracebacks."""
    frames = sys._current_frames()  # noqa: SLF001 - there is no other way to see another thread's frames
    named = [(thread.name, frames[thread.ident]) for thread in threading.enumerate() if thread.ident in frames]
    return "\n".join(f"thread {name}:\n{''.join(traceback.format_stack(frame))}" for name, frame in named)
