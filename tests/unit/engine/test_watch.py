"""What counts as hung, and what is written down of it."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from paceline.engine.watch import Stall, stacks, until_hung


def test_only_time_inside_one_call_counts() -> None:
    stall = Stall(tick_s=1.0)
    seen = [(None, 10.0), (4, 11.0), (4, 12.0), (4, 13.0), (5, 14.0), (5, 15.0), (None, 16.0), (6, 17.0)]
    assert [stall.look(call, now_s) for call, now_s in seen] == [0.0, 0.0, 1.0, 2.0, 0.0, 1.0, 0.0, 0.0]


def test_a_process_that_was_frozen_has_not_hung_meanwhile() -> None:
    stall = Stall(tick_s=1.0)
    stall.look(4, 10.0)
    assert stall.look(4, 10_000.0) == 2.0


@dataclass
class Device:
    at_work: int | None = None


async def test_a_device_that_waits_is_never_hung_and_one_that_does_not_come_back_is() -> None:
    device, stalled = Device(), list[float]()
    watching = asyncio.create_task(until_hung(device, lambda: 0.2, stalled.append))
    done, _ = await asyncio.wait({watching}, timeout=0.5)
    assert not done
    device.at_work = 1
    assert await asyncio.wait_for(watching, 10) > 0.2
    assert not stalled


async def test_an_event_loop_that_does_not_come_round_is_seen_from_outside() -> None:
    seen, stalled = threading.Event(), list[float]()
    watching = asyncio.create_task(
        until_hung(Device(), lambda: 0.2, lambda stuck_s: stalled.append(stuck_s) or seen.set())
    )
    await asyncio.sleep(0)
    assert seen.wait(10), "the loop stands still meanwhile"
    assert stalled[0] > 0.2
    watching.cancel()


def test_stacks_name_threads_and_what_they_do() -> None:
    leave = threading.Event()

    def lost_in_thought() -> None:
        leave.wait(10)

    thread = threading.Thread(target=lost_in_thought, name="engine of this test")
    thread.start()
    try:
        seen = stacks()
    finally:
        leave.set()
        thread.join()
    assert "thread engine of this test:" in seen
    assert "in lost_in_thought" in seen
    assert "in test_stacks_name_threads_and_what_they_do" in seen
