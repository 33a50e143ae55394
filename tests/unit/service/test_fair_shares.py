"""Places, bytes and threads among API keys: none is wasted on nobody, none is taken from a newcomer; and turns."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import OverloadedError
from paceline.service.fair_shares import Caller, EvictingLimit, FairThreads, Shares, may_take

PLACES = st.integers(1, 300)
HELD = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 60))


def take_all(held: dict[str, int], key: str, *, num_keys: int, total: int) -> int:
    """Lets a key take places one by one until it is refused; returns how many it holds then."""
    while may_take(1, key=key, held=held, num_keys=num_keys, total=total):
        held[key] = held.get(key, 0) + 1
    return held[key]


@given(max_sessions=PLACES, held=st.integers(0, 300), wanted=st.integers(1, 300))
def test_a_key_without_rivals_may_take_all_places(max_sessions: int, held: int, wanted: int) -> None:
    fit = may_take(wanted, key="a", held={"a": held}, num_keys=1, total=max_sessions)
    assert fit == (held + wanted <= max_sessions)


@given(max_sessions=PLACES, num_keys=st.integers(2, 50))
def test_what_fits_at_all_fits_while_nobody_holds_anything(max_sessions: int, num_keys: int) -> None:
    """128 choices at a gateway with 128 places were told to come again, for ever."""
    assert may_take(max_sessions, key="a", held={"b": 0}, num_keys=num_keys, total=max_sessions)
    assert not may_take(max_sessions + 1, key="a", held={}, num_keys=num_keys, total=max_sessions)


@given(max_sessions=PLACES, held=HELD, wanted=st.integers(1, 60), num_keys=st.integers(1, 50))
def test_no_more_places_are_given_than_there_are(
    max_sessions: int, held: dict[str, int], wanted: int, num_keys: int
) -> None:
    if may_take(wanted, key="a", held=held, num_keys=num_keys, total=max_sessions):
        assert sum(held.values()) + wanted <= max_sessions


@given(max_sessions=st.integers(2, 300), num_keys=st.integers(2, 100))
def test_a_greedy_key_leaves_room_for_a_newcomer_and_not_more_than_an_eighth(max_sessions: int, num_keys: int) -> None:
    held: dict[str, int] = {}
    taken = take_all(held, "greedy", num_keys=num_keys, total=max_sessions)
    assert max_sessions - taken == -(-max_sessions // 8)
    assert may_take(1, key="newcomer", held=held, num_keys=num_keys, total=max_sessions)


@given(max_sessions=PLACES, held=HELD, num_keys=st.integers(8, 50))
def test_a_key_below_its_share_is_only_ever_refused_for_want_of_a_free_place(
    max_sessions: int, held: dict[str, int], num_keys: int
) -> None:
    active = {key for key, count in held.items() if count} | {"a"}
    if held.get("a", 0) + 1 <= max_sessions // (len(active) + 1):
        free = max_sessions - sum(held.values())
        assert may_take(1, key="a", held=held, num_keys=num_keys, total=max_sessions) == (free >= 1)


def test_keys_that_all_want_everything_end_with_equal_parts_even_if_the_greedy_one_asks_first() -> None:
    held: dict[str, int] = {}
    take_all(held, "greedy", num_keys=2, total=8)
    assert held == {"greedy": 7}
    take_all(held, "late", num_keys=2, total=8)
    assert held == {"greedy": 7, "late": 1}
    for _ in range(3):
        held["greedy"] -= 1
        take_all(held, "greedy", num_keys=2, total=8)
        take_all(held, "late", num_keys=2, total=8)
    assert held == {"greedy": 4, "late": 4}


def test_rivals_who_want_little_cost_an_eighth_at_most() -> None:
    held = {"a": 1, "b": 1, "c": 1, "greedy": 0}
    take_all(held, "greedy", num_keys=4, total=32)
    assert sum(held.values()) == 32 - 4
    take_all(rest := {"a": 1, "greedy": 0}, "greedy", num_keys=100, total=32)
    assert sum(rest.values()) == 32 - 4
    assert [may_take(n, key="a", held={"b": 1}, num_keys=2, total=8) for n in (4, 6, 7)] == [True, True, False]


async def test_callers_that_wait_take_turns_and_one_that_leaves_holds_nothing() -> None:
    shares, order = Shares(2, "bytes"), []

    async def take(name: str, amount: int) -> None:
        with shares.take(0, Caller(name=name)) as held:
            await held.wait(amount)
            order.append(name)

    with shares.take(2, Caller(name="a")):
        waiting = [asyncio.create_task(take(name, 2)) for name in ("a", "a", "left", "b", "b")]
        await asyncio.sleep(0)
        waiting.pop(2).cancel()
        await asyncio.sleep(0)
        assert order == []
    await asyncio.gather(*waiting)
    assert order == ["a", "b", "a", "b"]
    assert shares.num_held == 0
    await shares.emptied()


async def test_what_does_not_fit_yet_holds_up_nobody_else() -> None:
    shares = Shares(4, "bytes")
    with shares.take(0, Caller(name="a")) as held, shares.take(0, Caller(name="b")) as other:
        with shares.take(2, Caller(name="c")):
            large = asyncio.create_task(held.wait(4))
            await asyncio.sleep(0)
            await other.wait(1)
        assert not large.done()
        other.release()
        await large
        assert shares.num_held == 4


async def test_what_waits_behind_something_large_is_served_when_that_leaves() -> None:
    shares, a = Shares(4, "bytes"), Caller(name="a")
    with shares.take(2, Caller(name="b")), shares.take(0, a) as large, shares.take(0, a) as small:
        first = asyncio.create_task(large.wait(4))
        await asyncio.sleep(0)
        second = asyncio.create_task(small.wait(1))
        await asyncio.sleep(0)
        assert not second.done()
        first.cancel()
        async with asyncio.timeout(30):
            await second


def test_one_holder_more_ends_the_idle_one_that_was_used_longest_ago() -> None:
    ended: list[str] = []
    holders: EvictingLimit[str] = EvictingLimit(3, ended.append, lambda name: name != "busy")
    for name in ("busy", "a", "b"):
        holders.add(name)
    holders.note_use("a")
    for name in ("c", "d"):
        holders.add(name)
    holders.remove("c")
    holders.add("e")
    assert ended == ["b", "a"]
    alone: EvictingLimit[str] = EvictingLimit(1, ended.append, lambda name: name != "busy")
    alone.add("busy")
    alone.add("late")
    assert ended == ["b", "a", "late"]


_who: ContextVar[str] = ContextVar("who", default="nobody")


class Bench:
    """One thread, and the order in which it worked for its owners."""

    def __init__(self, longest_wait_s: float = 60.0) -> None:
        self.order: list[str] = []
        self.threads = FairThreads(1, "work", longest_wait_s=longest_wait_s)

    def begin(self, owner: str) -> asyncio.Task[None]:
        return asyncio.create_task(self.threads.run(lambda: self.order.append(owner), owner))

    async def hold(self, owner: str = "holder") -> Callable[[], None]:
        """Keeps the thread busy until the returned function is called."""
        begun, over = threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            over.wait(10)

        self.holding = asyncio.create_task(self.threads.run(work, owner))
        await asyncio.to_thread(begun.wait, 10)
        return over.set


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    bench.threads.close()


async def test_owners_of_work_take_turns_however_much_of_it_one_has(bench: Bench) -> None:
    mark_ready = await bench.hold()
    greedy = [bench.begin("greedy") for _ in range(4)]
    await asyncio.sleep(0)
    modest = [bench.begin("modest") for _ in range(2)]
    await asyncio.sleep(0)
    mark_ready()
    await asyncio.gather(*greedy, *modest)
    assert bench.order == ["greedy", "modest", "greedy", "modest", "greedy", "greedy"]


async def test_results_errors_and_the_callers_context_come_through(bench: Bench) -> None:
    _who.set("caller")
    assert await bench.threads.run(_who.get, "any") == "caller"
    with pytest.raises(ZeroDivisionError):
        await bench.threads.run(lambda: 1 / 0, "any")
    assert await bench.threads.run(lambda: 3, "any") == 3


async def test_work_waits_for_a_bounded_time_and_leaves_with_its_caller() -> None:
    bench = Bench(longest_wait_s=0.02)
    mark_ready = await bench.hold()
    left = bench.begin("left")
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(OverloadedError, match=r"work: it has waited for 0\.02 s"):
        await bench.begin("late")
    mark_ready()
    await bench.holding
    await bench.begin("after")
    assert bench.order == ["after"]
    bench.threads.close()


async def test_a_thread_is_taken_until_its_function_ends_also_when_the_caller_has_left(bench: Bench) -> None:
    mark_ready = await bench.hold("greedy")
    bench.holding.cancel()
    await asyncio.sleep(0)
    greedy = bench.begin("greedy")
    await asyncio.sleep(0)
    modest = bench.begin("modest")
    await asyncio.sleep(0)
    mark_ready()
    await asyncio.gather(greedy, modest)
    assert bench.order == ["modest", "greedy"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no priority of its own")
async def test_threads_may_yield_to_the_rest_of_their_process() -> None:
    threads = FairThreads(1, "work", longest_wait_s=1.0, niceness=3)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        nicer = await threads.run(lambda: os.getpriority(os.PRIO_PROCESS, 0), "owner")
    finally:
        threads.close()
    assert nicer == min(own + 3, 19)
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


async def test_callers_that_come_one_by_one_do_not_overtake_those_that_wait(bench: Bench) -> None:
    mark_ready = await bench.hold("a")
    waiting = [bench.begin("queue") for _ in range(4)]
    await asyncio.sleep(0)
    mark_ready()

    async def one_by_one(name: str) -> None:
        for _ in range(4):
            await bench.begin(name)

    await asyncio.gather(*waiting, one_by_one("a"), one_by_one("b"))
    last = len(bench.order) - 1 - bench.order[::-1].index("queue")
    assert bench.order[: last + 1].count("a") <= 5
    assert bench.order[: last + 1].count("b") <= 5
    gaps = np.diff([place for place, name in enumerate(bench.order) if name == "queue"])
    assert max(gaps) <= 3, "each has its turn"
