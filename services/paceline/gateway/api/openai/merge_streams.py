"""Joins the event streams of several sessions into one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

ItemT = TypeVar("ItemT")

# A slow client stops the sessions after that many events instead of filling memory.
MAX_WAITING_EVENTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """One stream has ended."""

    error: Exception | None = None


async def merged(
    streams: Sequence[AsyncGenerator[ItemT, None]],
) -> AsyncGenerator[tuple[int, ItemT], None]:
    """Yields (index of the stream, item) as items come; the first error ends all streams.

    Closing it closes all streams.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, ItemT] | _Ended] = asyncio.Queue(MAX_WAITING_EVENTS)
    tasks: list[asyncio.Task[None]] = []
    try:
        for index, stream in enumerate(streams):
            tasks.append(asyncio.create_task(_pump(index, stream, queue)))
            # Each begins in a turn of its own: 128 samples of a long prompt take half a second.
            await asyncio.sleep(0)
        num_open = len(tasks)
        while num_open:
            entry = await queue.get()
            if not isinstance(entry, _Ended):
                yield entry
            elif entry.error is not None:
                raise entry.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    index: int, stream: AsyncGenerator[ItemT, None], queue: asyncio.Queue[tuple[int, ItemT] | _Ended]
) -> None:
    try:
        async with aclosing(stream) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as error:  # noqa: BLE001 - raised again by the reader of the queue
        await queue.put(_Ended(error=error))
    else:
        await queue.put(_Ended())
