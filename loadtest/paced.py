"""Loads that go on for a while, over HTTP or gRPC."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from loadtest.streams import COUNTED, Ask, Completion, Door
from paceline.planning.report import tokens_of

OFF: Mapping[str, Any] = {"enabled": False}


def ask_of(number: int, mean_tokens: int, speculation: Mapping[str, Any] | None = None) -> Ask:
    """Request `number` of a load, over HTTP, with the number of tokens in each event."""
    return Ask(
        prompt=f"request number {number} of this load, and ",
        max_tokens=tokens_of(number, mean_tokens),
        seed=number,
        speculation=speculation,
        more=COUNTED,
    )


async def keep_busy(door: Door, make: Callable[[int], Ask], streams: int, seconds: float) -> list[Completion]:
    """Keeps so many streams busy for a time, each with one request after the other; returns all in their order.

    Args:
        door: Where they go.
        make: Makes request `number`.
        streams: How many at once.
        seconds: For how long; what has begun then runs to its end.

    Raises:
        RuntimeError: A request failed; the message is the server's.
    """
    numbers, done, origin_s = itertools.count(), dict[int, Completion](), time.perf_counter()

    async def stream() -> None:
        while time.perf_counter() - origin_s < seconds:
            number = next(numbers)
            done[number] = await door.ask(make(number), origin_s)

    await asyncio.gather(*(stream() for _ in range(streams)))
    if failed := [each.message for each in done.values() if each.error]:
        raise RuntimeError(f"{len(failed)} of {len(done)} requests failed, first: {failed[0]}")
    return [done[number] for number in sorted(done)]


def within(completion: Completion, since_s: float, until_s: float) -> Completion:
    """The part of a completion that came within a time."""
    return replace(completion, counts=[each for each in completion.counts if since_s <= each[0] < until_s])
