"""Joins the event streams of several sessions into one, and ties work to a client's presence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

ItemT = TypeVar("ItemT")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

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
    tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
    try:
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


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs work to its end, or until the HTTP client has left; its cleaning up is waited for."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
