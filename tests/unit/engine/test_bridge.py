"""The bridge loses no event, delivers every output, and dies loudly."""

from __future__ import annotations

import asyncio
import threading

import pytest

from paceline.core.errors import UnavailableError
from paceline.engine import bridge
from paceline.engine.bridge import EngineThread


class Adder:
    """Adds up what it is told; a step hands out the sum so far."""

    def __init__(self, patience_s: float = 0.0) -> None:
        self.total = 0
        self.fresh = False
        self.early: int | None = None
        self.patience = patience_s
        self.thread = threading.current_thread()

    def handle(self, event: int) -> None:
        self.total += event
        self.fresh = True
        self.patience = 0.0

    def has_work(self) -> bool:
        return self.fresh

    def patience_s(self) -> float:
        return self.patience

    def begin(self) -> int | None:
        early, self.early = self.early, None
        return early

    def step(self, tell=None) -> int:
        if self.total < 0:
            raise ArithmeticError("negative")
        self.fresh = False
        return self.total


async def started(stepper: Adder | None = None):
    outputs: asyncio.Queue[int] = asyncio.Queue()
    engine: EngineThread[int, int] = EngineThread(lambda: stepper or Adder(), outputs.put_nowait, "adder")
    await engine.start()
    return engine, outputs


async def test_every_event_is_handled_once_whoever_posts_it():
    engine, outputs = await started()
    posters = [threading.Thread(target=lambda: [engine.post(1) for _ in range(500)]) for _ in range(4)]
    for poster in posters:
        poster.start()
    while await asyncio.wait_for(outputs.get(), 10) < 2000:
        pass
    await engine.close()
    assert outputs.empty()


async def test_the_stepper_lives_in_the_engines_thread():
    made: list[Adder] = []
    outputs: asyncio.Queue[int] = asyncio.Queue()
    engine: EngineThread[int, int] = EngineThread(lambda: made.append(Adder()) or made[0], outputs.put_nowait, "adder")
    await engine.start()
    assert made[0].thread is not threading.current_thread()
    await engine.close()


async def test_a_failing_start_reaches_the_caller():
    def fail() -> Adder:
        raise FileNotFoundError("no checkpoint")

    engine: EngineThread[int, int] = EngineThread(fail, lambda _: None, "adder")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        await engine.start()


async def test_a_failing_step_reaches_every_waiter_and_later_posts_are_refused():
    engine, _ = await started()
    waiters = [asyncio.ensure_future(engine.ended()) for _ in range(3)]
    engine.post(-1)
    for waiter in waiters:
        with pytest.raises(ArithmeticError, match="negative"):
            await asyncio.wait_for(waiter, 10)
    with pytest.raises(UnavailableError):
        engine.post(1)


async def test_a_closed_engine_ends_without_error():
    engine, _ = await started()
    await engine.close()
    await asyncio.wait_for(engine.ended(), 10)
    with pytest.raises(UnavailableError):
        engine.post(1)


async def test_patience_ends_when_an_event_arrives():
    engine, outputs = await started(Adder(patience_s=3600.0))
    engine.post(5)
    assert await asyncio.wait_for(outputs.get(), 10) == 5
    await engine.close()


async def test_what_a_stepper_says_first_goes_out_before_its_step():
    stepper = Adder()
    stepper.early = -7
    engine, outputs = await started(stepper)
    engine.post(5)
    assert [await asyncio.wait_for(outputs.get(), 10) for _ in range(2)] == [-7, 5]
    await engine.close()


async def test_what_the_engine_is_inside_of_shows_until_it_comes_back():
    inside, leave = threading.Event(), threading.Event()

    class Slow(Adder):
        def step(self, tell=None) -> int:
            inside.set()
            leave.wait(10)
            return super().step()

    engine, outputs = await started(Slow())
    assert engine.at_work is None
    engine.post(5)
    await asyncio.to_thread(inside.wait, 10)
    assert engine.at_work == engine.num_calls == 3  # handle, begin, step
    leave.set()
    assert await asyncio.wait_for(outputs.get(), 10) == 5
    await engine.close()
    assert engine.at_work is None


class Steady(Adder):
    """Always has work; its second step takes until it is told to end, or cannot be planned."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.inside, self.leave, self.fails, self.num_steps = threading.Event(), threading.Event(), fails, 0

    def has_work(self) -> bool:
        return self.total > 0 and self.num_steps < 2

    def begin(self) -> int | None:
        if self.fails and self.num_steps == 1:
            raise ArithmeticError("the second step")
        return super().begin()

    def step(self, tell=None) -> int:
        self.num_steps += 1
        if self.num_steps == 2:
            self.inside.set()
            self.leave.wait(10)
        return self.num_steps


async def test_what_a_step_has_done_is_handed_on_while_the_next_one_runs():
    stepper = Steady()
    engine, outputs = await started(stepper)
    engine.post(5)
    await asyncio.to_thread(stepper.inside.wait, 10)
    assert await asyncio.wait_for(outputs.get(), 10) == 1
    assert outputs.empty()
    stepper.leave.set()
    assert await asyncio.wait_for(outputs.get(), 10) == 2, "no step follows: it is handed on at once"
    await engine.close()


async def test_what_others_wait_for_is_handed_on_in_the_middle_of_a_step():
    class Telling(Adder):
        """Ends a step once what it has told has arrived."""

        def step(self, tell=None) -> int:
            tell(-1)
            assert arrived == [-1], "the event loop has had its turn"
            return super().step()

    arrived: list[int] = []
    outputs: asyncio.Queue[int] = asyncio.Queue()

    def deliver(output: int) -> None:
        arrived.append(output)
        outputs.put_nowait(output)

    engine: EngineThread[int, int] = EngineThread(Telling, deliver, "adder")
    await engine.start()
    engine.post(5)
    assert [await asyncio.wait_for(outputs.get(), 10) for _ in range(2)] == [-1, 5]
    await engine.close()


async def test_what_was_done_before_a_step_that_cannot_be_planned_is_handed_on():
    engine, outputs = await started(Steady(fails=True))
    engine.post(5)
    assert await asyncio.wait_for(outputs.get(), 10) == 1
    with pytest.raises(ArithmeticError, match="the second step"):
        await asyncio.wait_for(engine.ended(), 10)


class Stuck(Adder):
    """Its first step lasts until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.let_go = threading.Event(), threading.Event()

    def step(self, tell=None) -> int:
        self.begun.set()
        self.let_go.wait(10)
        return super().step()


async def test_a_peer_that_sends_more_than_a_step_takes_waits_and_nobody_else(monkeypatch):
    """Audit 3, a13: the inbox counted messages, so that what waited in it had no bound in bytes."""
    monkeypatch.setattr(bridge, "PEER_BYTES", 100)
    stuck = Stuck()
    engine, outputs = await started(stuck)
    engine.post(1)
    await asyncio.to_thread(stuck.begun.wait, 10)
    await engine.post_from("greedy", 10, 1000)
    held_up = [asyncio.create_task(engine.post_from("greedy", 100, 1)) for _ in range(2)]
    await engine.post_from("modest", 1000, 60)
    await engine.post_from("modest", 1000, 40)
    engine.post(1000)
    assert not any(each.done() for each in held_up)
    stuck.let_go.set()
    async with asyncio.timeout(10):
        await asyncio.gather(*held_up)
        while await outputs.get() < 3211:
            pass
    await engine.close()


@pytest.mark.parametrize("last", [-10, 10], ids=["it dies", "it is closed"])
async def test_a_peer_that_waits_for_an_engine_is_told_that_it_has_ended(monkeypatch, last: int):
    monkeypatch.setattr(bridge, "PEER_BYTES", 100)
    stuck = Stuck()
    engine, _ = await started(stuck)
    engine.post(last)
    await asyncio.to_thread(stuck.begun.wait, 10)
    await engine.post_from("greedy", 1, 1000)

    async def insist() -> None:
        while True:
            await engine.post_from("greedy", 1, 1000)

    insisting = asyncio.create_task(insist())
    await asyncio.sleep(0)
    closing = asyncio.create_task(engine.close())
    stuck.let_go.set()
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(insisting, 10)
    await closing
