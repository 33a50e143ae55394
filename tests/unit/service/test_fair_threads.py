"""Threads whose time is shared fairly."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar

import pytest

from paceline.core.errors import OverloadedError
from paceline.service.fair_threads import FairThreads

_who: ContextVar[str] = ContextVar("who", default="nobody")


class Bench:
    """One thread whose work takes as long as the test says, by a clock that the test moves."""

    def __init__(self, *, most_waiting: int = 100, longest_wait_s: float = 60.0) -> None:
        self.now_s = 0.0
        self.order: list[str] = []
        self.threads = FairThreads(
            1, "work", most_waiting=most_waiting, longest_wait_s=longest_wait_s, clock=lambda: self.now_s
        )

    def begin(self, owner: str, seconds: float = 1.0) -> asyncio.Task[str]:
        def work() -> str:
            self.now_s += seconds
            self.order.append(owner)
            return owner

        return asyncio.create_task(self.threads.run(work, owner))

    async def hold(self) -> Callable[[], None]:
        """Keeps the thread busy until the returned function is called."""
        begun, over = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            over.wait(10)

        self.holding = asyncio.create_task(self.threads.run(work, "holder"))
        await asyncio.to_thread(begun.wait, 10)
        return over.set


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.threads.close()


async def test_the_owner_that_has_used_least_is_served_first(bench: Bench) -> None:
    let_go = await bench.hold()
    greedy = [bench.begin("greedy") for _ in range(5)]
    await asyncio.sleep(0)
    modest = [bench.begin("modest", 0.1) for _ in range(2)]
    await asyncio.sleep(0)
    let_go()
    await asyncio.gather(*greedy, *modest)
    assert bench.order == ["greedy", "modest", "modest", "greedy", "greedy", "greedy", "greedy"]


async def test_what_was_used_long_ago_is_forgotten(bench: Bench) -> None:
    await bench.begin("greedy", 30.0)
    bench.now_s += 3600
    await bench.begin("modest", 1.0)
    let_go = await bench.hold()
    tasks = [bench.begin("modest"), bench.begin("greedy")]
    await asyncio.sleep(0)
    let_go()
    await asyncio.gather(*tasks)
    assert bench.order[-2:] == ["greedy", "modest"]


async def test_results_errors_and_the_callers_context_come_through(bench: Bench) -> None:
    _who.set("caller")
    assert await bench.threads.run(_who.get, "any") == "caller"
    with pytest.raises(ZeroDivisionError):
        await bench.threads.run(lambda: 1 / 0, "any")
    assert await bench.begin("any") == "any"


async def test_full_queues_refuse_the_newest_work_of_the_longest_one() -> None:
    bench = Bench(most_waiting=3)
    let_go = await bench.hold()
    greedy = [bench.begin("greedy") for _ in range(3)]
    await asyncio.sleep(0)
    refused = bench.begin("greedy")
    with pytest.raises(OverloadedError, match="work: 3 wait already"):
        await refused
    modest = bench.begin("modest")
    with pytest.raises(OverloadedError):
        await greedy.pop()
    let_go()
    await asyncio.gather(modest, *greedy)
    assert sorted(bench.order) == ["greedy", "greedy", "modest"]
    bench.threads.close()


async def test_work_waits_for_a_bounded_time_and_leaves_with_its_caller() -> None:
    bench = Bench(longest_wait_s=0.02)
    let_go = await bench.hold()
    left = bench.begin("left")
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(OverloadedError, match=r"it has waited for 0\.02 s"):
        await bench.begin("late")
    let_go()
    await bench.begin("after")
    assert bench.order == ["after"]
    bench.threads.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
async def test_threads_may_yield_to_the_rest_of_their_process() -> None:
    threads = FairThreads(1, "work", most_waiting=1, longest_wait_s=1.0, niceness=3)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        nicer = await threads.run(lambda: os.getpriority(os.PRIO_PROCESS, 0), "owner")
    finally:
        threads.close()
    assert nicer == min(own + 3, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
