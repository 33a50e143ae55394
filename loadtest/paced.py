"""Loads that go on for a while, and what the planner says of them; for fleets of simulated devices."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from loadtest.streams import Ask, Completion, Door
from paceline.planning.engines import Request
from paceline.planning.simulation import Fleet, FleetAtWork, Outcome, Way
from paceline.simulated.model import guesses_of
from paceline.simulated.profile import Profile

# Share of a load's time in which it finds its pace; nothing of it is counted.
SETTLING = 1 / 3
PROMPT_TOKENS = 16
OFF: Mapping[str, Any] = {"enabled": False}
# Simulated seconds of the planner: as many for one stream, and fewer for many, down to the least.
PLANNED_S, LEAST_PLANNED_S = 60.0, 4.0


def tokens_of(number: int, mean: int) -> int:
    """Length of a text: half to one and a half times the mean, so that texts do not begin and end in lockstep."""
    return random.Random(number).randint(mean // 2, mean * 3 // 2)


def ask_of(number: int, mean_tokens: int, speculation: Mapping[str, Any] | None = None) -> Ask:
    """Request `number` of a load, over HTTP, with the number of tokens in each event."""
    return Ask(
        prompt=f"request number {number} of this load, and ",
        max_tokens=tokens_of(number, mean_tokens),
        seed=number,
        speculation=speculation,
        more={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
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


def planned(profile: Profile, acceptance: float | None, way: Way, streams: int, mean_tokens: int) -> Outcome:
    """What the planner says of such a load where our own code takes no time.

    Args:
        profile: Facts.
        acceptance: Chance that a first guess is right; None: the profile's law.
        way: How drafts are made.
        streams: How many at once.
        mean_tokens: Mean length of a text.
    """
    # In the profile, our own code is a share of a step; here it takes its time, and the planner has none.
    profile = replace(profile, truth=guesses_of(profile, acceptance), drafting_overhead=0.0)
    until_s, requests = max(LEAST_PLANNED_S, PLANNED_S / streams), list[Request]()

    def ask() -> None:
        number = len(requests)
        asked = Request(
            number=number,
            at_s=work.events.now_s,
            num_prompt_tokens=PROMPT_TOKENS,
            num_output_tokens=tokens_of(number, mean_tokens),
        )
        requests.append(asked)
        work.ask(asked)

    fleet = Fleet(way=way, num_drafters=int(way is Way.TIER))
    work = FleetAtWork(profile, fleet, 0, lambda _: work.events.after(0.0, ask))
    for _ in range(streams):
        ask()
    work.events.run(until_s)
    return Outcome(requests=requests, door_s=0.0, since_s=SETTLING * until_s, until_s=until_s)
