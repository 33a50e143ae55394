"""Joined streams yield everything, end together and leave nothing running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from paceline.gateway.api.openai.endpoint import MAX_WAITING_EVENTS, merged
from paceline.gateway.http.response import until_disconnect


class Streams:
    """Counting streams that remember how they ended."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def count(self, name: str, num_items: int, error: Exception | None = None) -> AsyncGenerator[str, None]:
        try:
            for number in range(num_items):
                await asyncio.sleep(0)
                yield f"{name}{number}"
            if error is not None:
                raise error
        finally:
            self.closed.append(name)


@pytest.mark.parametrize("num_streams", [1, 3])
async def test_items_of_each_stream_come_in_order(num_streams: int) -> None:
    streams = Streams()
    items = [item async for item in merged([streams.count("a", 100) for _ in range(num_streams)])]
    for index in range(num_streams):
        assert [item for at, item in items if at == index] == [f"a{number}" for number in range(100)]


@pytest.mark.parametrize("others", [[], ["b", "c"]])
async def test_the_first_error_ends_all_streams(others: list[str]) -> None:
    streams = Streams()
    runs = [streams.count("a", 2, ValueError("broken")), *(streams.count(name, 10**9) for name in others)]
    with pytest.raises(ValueError, match="broken"):
        async for _ in merged(runs):
            pass
    assert sorted(streams.closed) == sorted(["a", *others])


async def test_leaving_early_closes_streams_that_wait_for_a_slow_reader() -> None:
    streams = Streams()
    async with aclosing(merged([streams.count("a", 10**9), streams.count("b", 10**9)])) as items:
        await anext(items)
        for _ in range(2 * MAX_WAITING_EVENTS):
            await asyncio.sleep(0)
    assert sorted(streams.closed) == ["a", "b"]


async def test_work_ends_when_the_client_leaves_and_its_cleaning_up_is_awaited() -> None:
    started, cleaned = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    async def receive() -> dict[str, str]:
        await started.wait()
        return {"type": "http.disconnect"}

    await until_disconnect(receive, work())
    assert cleaned.is_set()


async def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("broken")

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    with pytest.raises(ValueError, match="broken"):
        await until_disconnect(receive, work())


async def test_an_error_of_the_cleanup_is_raised_though_the_client_has_left() -> None:
    started = asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            raise ValueError("the place was not given back")

    async def receive() -> dict[str, str]:
        await started.wait()
        return {"type": "http.disconnect"}

    with pytest.raises(ValueError, match="the place was not given back"):
        await until_disconnect(receive, work())
