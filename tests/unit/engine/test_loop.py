"""An engine's loop loses no event, delivers every output, and dies loudly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from paceline.core.errors import UnavailableError
from paceline.engine import loop
from paceline.engine.loop import Device, EngineLoop, inline


class Adder:
    """Adds up what it is told; a step hands out the sum so far.

    Args:
        computes: Called by the device in each step.
    """

    def __init__(self, patience_s: float = 0.0, computes: Callable[[], None] = lambda: None) -> None:
        self.total = 0
        self.fresh = False
        self.patience = patience_s
        self.computes = computes
        self.thread = threading.current_thread()

    def handle(self, event: int) -> None:
        self.total += event
        self.fresh = True
        self.patience = 0.0

    def has_work(self) -> bool:
        return self.fresh

    def patience_s(self) -> float:
        return self.patience

    async def step(self, compute=inline, tell=None) -> int:
        self.fresh = False
        await compute(self.computes)
        if self.total < 0:
            raise ArithmeticError("negative")
        return self.total


@asynccontextmanager
async def started(stepper: Adder | None = None):
    outputs: asyncio.Queue[int] = asyncio.Queue()
    engine: EngineLoop[int, int] = EngineLoop(lambda: stepper or Adder(), outputs.put_nowait, Device("adder"))
    await engine.start()
    yield engine, outputs
    await engine.close()


async def soon(awaitable: Awaitable[object]) -> object:
    return await asyncio.wait_for(awaitable, 10)


class Held:
    """A call that lasts until it is let go."""

    def __init__(self) -> None:
        self.begun, self.mark_ready = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        self.mark_ready.wait(10)


async def test_every_event_is_handled_once_and_those_of_one_step_together() -> None:
    async with started() as (engine, outputs):
        for _ in range(2000):
            engine.post(1)
        assert await soon(outputs.get()) == 2000
        engine.post(1)
        assert await soon(outputs.get()) == 2001
        assert outputs.empty()


async def test_the_stepper_is_made_in_the_devices_thread() -> None:
    made: list[Adder] = []
    engine: EngineLoop[int, int] = EngineLoop(lambda: made.append(Adder()) or made[0], lambda _: None, Device("adder"))
    await engine.start()
    assert made[0].thread.name == "adder"
    await engine.close()


async def test_a_failing_start_reaches_the_caller() -> None:
    def fail() -> Adder:
        raise FileNotFoundError("no checkpoint")

    engine: EngineLoop[int, int] = EngineLoop(fail, lambda _: None, Device("adder"))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        await engine.start()


def fail() -> None:
    raise ArithmeticError("negative")


@pytest.mark.parametrize(("computes", "event"), [(fail, 1), (lambda: None, -1)], ids=["the device", "the step"])
async def test_a_failing_step_reaches_every_waiter_and_later_posts_are_refused(computes, event: int) -> None:
    async with started(Adder(computes=computes)) as (engine, _):
        waiters = [asyncio.ensure_future(engine.ended()) for _ in range(3)]
        engine.post(event)
        for waiter in waiters:
            with pytest.raises(ArithmeticError, match="negative"):
                await soon(waiter)
        with pytest.raises(UnavailableError):
            engine.post(1)


async def test_a_closed_engine_ends_without_error() -> None:
    async with started() as (engine, _):
        await engine.close()
        await soon(engine.ended())
        with pytest.raises(UnavailableError):
            engine.post(1)


async def test_patience_ends_when_an_event_arrives_or_when_it_is_over() -> None:
    async with started(Adder(patience_s=3600.0)) as (engine, outputs):
        engine.post(5)
        assert await soon(outputs.get()) == 5
    impatient, patience = Adder(), iter([0.01, 0.0])
    impatient.fresh = True
    impatient.patience_s = lambda: next(patience)  # type: ignore[method-assign]
    async with started(impatient) as (_, outputs):
        assert await soon(outputs.get()) == 0


async def test_what_the_device_is_inside_of_shows_until_it_comes_back_and_the_loop_goes_on() -> None:
    held = Held()
    async with started(Adder(computes=held)) as (engine, outputs):
        assert engine.device.at_work is None
        engine.post(5)
        await asyncio.to_thread(held.begun.wait, 10)
        assert engine.device.at_work == engine.device.num_calls == 2  # it has made the stepper
        held.mark_ready.set()
        assert await soon(outputs.get()) == 5
        assert engine.device.at_work is None


async def test_what_can_wait_is_done_once_the_device_is_at_work_or_when_nothing_is_left_to_compute() -> None:
    device, held, done = Device("adder"), Held(), asyncio.Event()
    device.start()
    device.meanwhile(done.set)
    computing = asyncio.create_task(device.run(held))
    await soon(done.wait())
    assert device.at_work
    held.mark_ready.set()
    await computing
    done.clear()
    device.meanwhile(done.set)
    assert not done.is_set()
    device.rest()
    assert done.is_set()


async def test_what_others_wait_for_is_delivered_in_the_middle_of_a_step() -> None:
    class Telling(Adder):
        async def step(self, compute=inline, tell=None) -> int:
            tell(-1)
            assert outputs.get_nowait() == -1
            return await super().step(compute)

    async with started(Telling()) as (engine, outputs):
        engine.post(5)
        assert await soon(outputs.get()) == 5


async def test_a_peer_that_sends_more_than_a_step_takes_waits_and_nobody_else(monkeypatch) -> None:
    """Audit 3, a13: the inbox counted messages, so that what waited in it had no bound in bytes."""
    monkeypatch.setattr(loop, "PEER_BYTES", 100)
    held = Held()
    async with started(Adder(computes=held)) as (engine, outputs):
        engine.post(1)
        await asyncio.to_thread(held.begun.wait, 10)
        await engine.post_from("greedy", 10, 1000)
        held_up = [asyncio.create_task(engine.post_from("greedy", 100, 1)) for _ in range(2)]
        await engine.post_from("modest", 1000, 60)
        await engine.post_from("modest", 1000, 40)
        engine.post(1000)
        assert not any(each.done() for each in held_up)
        held.mark_ready.set()
        await soon(asyncio.gather(*held_up))
        while await soon(outputs.get()) < 3211:
            pass


@pytest.mark.parametrize("last", [-10, 10], ids=["it dies", "it is closed"])
async def test_a_peer_that_waits_for_an_engine_is_told_that_it_has_ended(monkeypatch, last: int) -> None:
    monkeypatch.setattr(loop, "PEER_BYTES", 100)
    held = Held()
    async with started(Adder(computes=held)) as (engine, _):
        engine.post(last)
        await asyncio.to_thread(held.begun.wait, 10)
        await engine.post_from("greedy", 1, 1000)

        async def insist() -> None:
            while True:
                await engine.post_from("greedy", 1, 1000)

        insisting = asyncio.create_task(insist())
        await asyncio.sleep(0)
        closing = asyncio.create_task(engine.close())
        held.mark_ready.set()
        with pytest.raises(UnavailableError):
            await soon(insisting)
        await closing


async def test_a_stop_iteration_of_the_device_reaches_whoever_waits() -> None:
    async with started() as (engine, _):
        with pytest.raises(RuntimeError, match="StopIteration"):
            await soon(engine.device.run(next, iter(())))


async def test_a_call_beside_the_device_that_raises_costs_no_other_call_and_not_the_engine() -> None:
    async with started() as (engine, outputs):
        done = asyncio.Event()
        engine.device.meanwhile([].pop)
        engine.device.meanwhile(done.set)
        engine.post(1)
        await soon(done.wait())
        assert await soon(outputs.get()) == 1


async def test_an_event_that_is_withdrawn_is_never_handled() -> None:
    async with started() as (engine, outputs):
        engine.post(1)
        engine.post(2)
        assert engine.withdraw(lambda event: event == 1) == [1]
        assert await soon(outputs.get()) == 2
