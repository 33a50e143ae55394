"""What waits for a peer is bounded in bytes."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import UnavailableError
from paceline.service.outbox import Outbox


async def test_parts_come_out_in_order_and_make_room() -> None:
    queue: Outbox[str] = Outbox(10)
    getting = asyncio.create_task(queue.get())
    queue.put([("a", 4), ("b", 6)])
    queue.put([("c", 10)])
    assert [await getting, await queue.get(), await queue.get()] == ["a", "b", "c"]
    queue.put([("d", 1)])
    assert await queue.get() == "d"


async def test_a_peer_that_does_not_read_is_left_so_many_bytes_however_few_parts() -> None:
    """Audit 3, a06: 4,096 parts of a megabyte waited for a drafter that asked again and again, and did not read."""
    queue: Outbox[str] = Outbox(10)
    queue.put([("first", 3)])
    queue.put([("b", 10)])
    with pytest.raises(asyncio.QueueFull):
        queue.put([("c", 1)])
    await queue.get()
    queue.put([("d", 3)])
    with pytest.raises(asyncio.QueueFull):
        queue.put([("e", 1)])


async def test_what_opens_all_sessions_of_a_new_stream_is_taken_whole() -> None:
    queue: Outbox[str] = Outbox(10)
    queue.put([("all", 500), ("sessions", 500)])
    queue.put([("news", 10)])
    with pytest.raises(asyncio.QueueFull):
        queue.put([("more", 1)])
    for _ in range(3):
        await queue.get()
    queue.put([("a", 1)])
    with pytest.raises(asyncio.QueueFull):
        queue.put([("b", 11)])


async def test_an_error_comes_at_once_and_drops_what_waits() -> None:
    queue: Outbox[str] = Outbox(10)
    queue.put([("a", 1)])
    queue.fail(UnavailableError("gone"))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="gone"):
            await queue.get()
