"""The longest stall of the event loop: of the last minute, whatever came after it."""

from __future__ import annotations

import asyncio
import time

import pytest
import uvloop
from prometheus_client import CollectorRegistry

from paceline.obs.metrics import INTERVAL_S, LongestStall, stalls_watched


def test_the_longest_stall_of_the_last_minute_is_told_until_it_is_older() -> None:
    longest = LongestStall(window_s=60)
    assert longest.longest_s(0) == 0
    for now_s, stall_s in ((1, 0.1), (2, 0.5), (3, 0.2), (40, 0.3)):
        longest.add(stall_s, now_s)
    assert [longest.longest_s(now_s) for now_s in (40, 62, 62.5, 100, 101)] == [0.5, 0.5, 0.3, 0.3, 0]


def test_of_falling_stalls_only_those_are_kept_that_may_be_told_yet() -> None:
    longest = LongestStall(window_s=1)
    for tick in range(1000):
        longest.add(1 / (tick + 1), tick / 10)
    assert len(longest._stalls) <= 11


async def test_a_loop_that_is_held_shows_for_how_long_at_least() -> None:
    registry = CollectorRegistry()

    def shown() -> float:
        return registry.get_sample_value("paceline:event_loop_stall_seconds") or 0.0

    with stalls_watched(registry):
        held = asyncio.Event()

        def hold() -> None:
            time.sleep(0.2)
            asyncio.get_running_loop().call_soon(held.set)

        asyncio.get_running_loop().call_later(0.02, hold)
        await held.wait()
        # The callback that was due meanwhile, and no later one, tells of it.
        await asyncio.sleep(0)
        assert 0.1 < shown() < 30
        # It slept, and computed next to nothing.
        assert (registry.get_sample_value("paceline:event_loop_stall_cpu_seconds") or 0.0) < 0.1


async def test_a_loop_that_computes_shows_its_own_cpu_time() -> None:
    registry = CollectorRegistry()
    with stalls_watched(registry):
        held = asyncio.Event()

        def hold() -> None:
            begun_s = time.thread_time()
            while time.thread_time() - begun_s < 0.1:
                pass
            asyncio.get_running_loop().call_soon(held.set)

        asyncio.get_running_loop().call_later(0.02, hold)
        await held.wait()
        await asyncio.sleep(0)
        assert (registry.get_sample_value("paceline:event_loop_stall_cpu_seconds") or 0.0) > 0.05


def test_a_loop_that_is_held_while_it_is_looked_at_is_watched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop of services hands out no timer for what is due at once."""
    looks: list[float] = []
    add = LongestStall.add

    def late(self: LongestStall, stall_s: float, now_s: float) -> None:
        looks.append(stall_s)
        time.sleep(2 * INTERVAL_S)
        add(self, stall_s, now_s)

    async def watch() -> None:
        with stalls_watched(CollectorRegistry()):
            while len(looks) < 3:  # noqa: ASYNC110 - looks tell nobody
                await asyncio.sleep(INTERVAL_S)

    monkeypatch.setattr(LongestStall, "add", late)
    uvloop.run(asyncio.wait_for(watch(), 30))
    assert len(looks) >= 3
