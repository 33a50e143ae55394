"""A tenant that takes all it can get, in one way, as a process of its own: `python -m loadtest.greedy bodies URL KEY`.

It prints a line when it begins, goes on until its standard input closes, and then prints how often each status came.
Refused requests are sent again soon, whatever the answer says of the time; refusals themselves cost time, and the
rate of refusals that a gateway bears is not measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

COMPLETIONS, RESPONSES, CONSOLE = "/v1/completions", "/v1/responses", "/console/figures"
NO_CONNECTION = "no connection"
REFUSED_PAUSE_S = 0.5
# The tenant's machine is another one: it leaves the cores of this one to those who want them.
NICENESS = 10
# Takes most of the time that one schema may take to be compiled.
NUM_PROPERTIES = 1000
# A lexer with more states than one may have; each character of an answer makes a new one.
LEXER_PATTERN = "[ab]*a[ab]{16}c"
# More tokens than any context: all are counted before the text is refused.
NUM_WORDS = 200_000
# Tokens of a prompt; those of all workers fill more pages than the verifier has.
NUM_PROMPT_TOKENS = 8_000
METADATA = {f"{number:064}": "x" * 512 for number in range(16)}
NAMED_EVENTS = {"stream": True, "stream_options": {"include_event_ids": True}}


@dataclass(slots=True, kw_only=True)
class Greedy:
    """A tenant's state: its connections, its chance, and the statuses so far."""

    http: aiohttp.ClientSession
    chance: random.Random
    statuses: Counter[str] = field(default_factory=Counter)

    async def ask(self, path: str, body: Any = None, method: str = "POST", **more: Any) -> bytes:
        """Sends a request and returns all that comes; waits a little after a refusal."""
        if body is not None:
            more["json"] = body
        try:
            async with self.http.request(method, path, **more) as response:
                self.statuses[str(response.status)] += 1
                came = await response.read()
                refused = response.status != 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            self.statuses[NO_CONNECTION] += 1
            came, refused = b"", True
        if refused:
            await asyncio.sleep(REFUSED_PAUSE_S * self.chance.uniform(0.5, 1.0))
        return came

    async def complete(self, **fields: Any) -> bytes:
        """Asks for a completion."""
        return await self.ask(COMPLETIONS, {"prompt": f"more, {self.chance.random()}", "max_tokens": 1, **fields})


async def _bodies(greedy: Greedy) -> None:
    """Requests whose bodies begin and never end."""
    await greedy.ask(COMPLETIONS, data=_never_ending(), headers={"content-type": "application/json"})


async def _never_ending() -> AsyncIterator[bytes]:
    yield b"{"
    await asyncio.Event().wait()


async def _compiling(greedy: Greedy) -> None:
    """Schemas that are new each time, and take long to be compiled."""
    number = greedy.chance.getrandbits(32)
    properties = {
        f"p{number}_{index}": {"type": "string", "pattern": "^[a-z]{1,20}$"} for index in range(NUM_PROPERTIES)
    }
    await greedy.complete(
        structured_outputs={"json": {"type": "object", "properties": properties, "additionalProperties": False}}
    )


async def _grammars(greedy: Greedy) -> None:
    """Answers that use up the lexer of a grammar which all sessions know."""
    await greedy.complete(structured_outputs={"regex": LEXER_PATTERN}, max_tokens=512, ignore_eos=True)


async def _kept(greedy: Greedy) -> None:
    """Responses with as much metadata as they may have, kept in the store."""
    body = {"input": "Keep this.", "max_output_tokens": 1}
    await greedy.ask(RESPONSES, {**body, "metadata": METADATA, "store": True})


async def _viewers(greedy: Greedy) -> None:
    """Pages of the console that ask again and again."""
    await greedy.ask(CONSOLE, method="GET")


async def _resuming(greedy: Greedy) -> None:
    """A stream that is resumed from its first event over and over, as resumed streams do not count."""
    prompt = f"once more, {greedy.chance.random()}"
    first = await greedy.complete(prompt=prompt, max_tokens=8, ignore_eos=True, **NAMED_EVENTS)
    ids = [line.removeprefix(b"id:").strip().decode() for line in first.splitlines() if line.startswith(b"id:")]
    while ids:
        await greedy.ask(
            COMPLETIONS, {"prompt": prompt, **NAMED_EVENTS}, headers={"Last-Event-ID": greedy.chance.choice(ids)}
        )


async def _texts(greedy: Greedy) -> None:
    """Texts that take long to be tokenized."""
    await greedy.complete(prompt="word " * NUM_WORDS)


async def _prompts(greedy: Greedy) -> None:
    """Prompts that take many steps to be read, new each time."""
    await greedy.complete(prompt=[greedy.chance.randrange(3, 200) for _ in range(NUM_PROMPT_TOKENS)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Greed:
    """A way to take all.

    Attributes:
        deed: Is done again and again.
        num_workers: How many do it side by side.
        limited: Whether its key has a limit of requests per minute, which it tries to pass.
        lengthens_steps: Whether it fills the steps that all share, so that of others only first tokens are promised.
    """

    deed: Callable[[Greedy], Awaitable[None]]
    num_workers: int
    limited: bool = False
    lengthens_steps: bool = False


KINDS: Mapping[str, Greed] = {
    "bodies": Greed(deed=_bodies, num_workers=800),
    "compiling": Greed(deed=_compiling, num_workers=16),
    "grammars": Greed(deed=_grammars, num_workers=4),
    "kept": Greed(deed=_kept, num_workers=16),
    "viewers": Greed(deed=_viewers, num_workers=100),
    "resuming": Greed(deed=_resuming, num_workers=16, limited=True),
    "texts": Greed(deed=_texts, num_workers=16),
    "prompts": Greed(deed=_prompts, num_workers=64, lengthens_steps=True),
}


async def take(greed: Greed, url: str, key: str, until: Awaitable[Any]) -> Counter[str]:
    """Takes all it can get until something happens; returns the statuses."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        url, headers={"authorization": f"Bearer {key}"}, connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as http:

        async def without_end(number: int) -> None:
            mine = Greedy(http=http, chance=random.Random(f"{key} {number}"), statuses=statuses)
            while True:
                await greed.deed(mine)

        statuses: Counter[str] = Counter()
        working = [asyncio.create_task(without_end(number)) for number in range(greed.num_workers)]
        await until
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    return statuses


def main() -> None:
    """Runs the process."""
    kind, url, key = sys.argv[1:]
    os.nice(NICENESS)

    async def until_closed() -> Counter[str]:
        print("begins", flush=True)
        return await take(KINDS[kind], url, key, asyncio.to_thread(sys.stdin.read))

    print(json.dumps(asyncio.run(until_closed())))


if __name__ == "__main__":
    main()
