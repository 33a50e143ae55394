"""Background tasks are kept at work, whatever ends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from paceline.service import supervision
from paceline.service.supervision import SETTLED_S, BackOff, TaskSupervisor
from tests.support.clock import Clock


class Patient:
    """A task that ends its first lives as it is told, and then lives."""

    def __init__(self, *deaths: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._deaths = list(deaths)
        self.num_lives = 0
        self.well = asyncio.Event()

    async def work(self) -> None:
        self.num_lives += 1
        if self._deaths:
            await self._deaths.pop(0)()
            return
        self.well.set()
        await asyncio.Event().wait()


async def ends() -> None: ...


async def fails() -> None:
    raise TypeError("'list' object is not a role")


async def is_cut_off() -> None:
    """Awaits something that somebody else cancels."""
    other = asyncio.get_running_loop().create_future()
    other.cancel()
    await other


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "QUICK", BackOff(first_s=0.0))


def restarts(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("paceline:task_restarts_total", {"task": "patient"})


@pytest.mark.parametrize("death", [ends, fails, is_cut_off])
async def test_a_task_that_dies_is_started_again_counted_and_told_of(
    death: Callable[[], Coroutine[Any, Any, None]], registry: CollectorRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    patient = Patient(death, death)
    supervisor = TaskSupervisor(registry)
    with caplog.at_level(logging.ERROR):
        async with supervisor.kept({"patient": patient.work}):
            assert restarts(registry) == 0
            await patient.well.wait()
            assert supervisor.failing == ("patient",)
    assert restarts(registry) == 2
    assert [vars(record)["task"] for record in caplog.records] == ["patient", "patient"]


async def test_a_task_is_failing_until_it_has_run_for_a_while(registry: CollectorRegistry) -> None:
    clock = Clock()
    supervisor = TaskSupervisor(registry, clock)
    patient, healthy = Patient(fails), Patient()
    async with supervisor.kept({"patient": patient.work, "healthy": healthy.work}):
        await healthy.well.wait()
        await patient.well.wait()
        clock.now_s = SETTLED_S - 0.1
        assert supervisor.failing == ("patient",)
        clock.now_s = SETTLED_S
        assert supervisor.failing == ()


async def test_a_task_that_pauses_after_its_death_is_failing_however_long_it_pauses(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "QUICK", BackOff(first_s=3600.0))
    clock = Clock()
    supervisor = TaskSupervisor(registry, clock)
    died = asyncio.Event()

    async def die() -> None:
        died.set()

    async with supervisor.kept({"patient": die}):
        await died.wait()
        assert restarts(registry) == 1
        clock.now_s = 10 * SETTLED_S
        assert supervisor.failing == ("patient",)
    assert supervisor.failing == ()


async def test_tasks_end_with_the_block_even_one_that_answers_its_end_with_an_error(
    registry: CollectorRegistry,
) -> None:
    stubborn = Patient()

    async def work() -> None:
        try:
            await stubborn.work()
        finally:
            raise OSError("the connection could not be closed")

    async with asyncio.timeout(30):
        async with TaskSupervisor(registry).kept({"patient": work}):
            await stubborn.well.wait()
    assert stubborn.num_lives == 1


async def test_a_task_that_loses_the_first_cancellation_ends_with_the_block(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "CANCEL_AGAIN_S", 0.001)
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async with asyncio.timeout(30):
        async with TaskSupervisor(registry).kept({"patient": work}):
            await began.wait()


async def test_an_error_of_the_block_ends_the_tasks_and_comes_through(registry: CollectorRegistry) -> None:
    patient = Patient()
    with pytest.raises(LookupError):
        async with TaskSupervisor(registry).kept({"patient": patient.work}):
            await patient.well.wait()
            raise LookupError
