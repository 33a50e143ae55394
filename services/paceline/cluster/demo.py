"""`paceline demo`: a real fleet streams completions with and without speculation, and compares every text.

A few prompts are streamed to the screen both ways; then a table measures both ways, greedy and sampled, at two
concurrencies. The demo takes a minute; the benches of a checkout measure with care.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, product, starmap
from statistics import fmean
from typing import Any, NamedTuple

import httpx
from tqdm import tqdm

from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.foreground import describe_models, say, table, until_ctrl_c
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, FleetSpec
from paceline.core.errors import PacelineError
from paceline.service.config import parse, setting
from paceline.service.process import run

PROG = "paceline demo"
DESCRIPTION = (
    "Starts a fleet of the demo pair on free ports, streams a few completions with and without speculation, compares "
    "all texts and prints the speed of both ways, greedy and sampled. Exit status 1 if a text differs where the "
    "engine promises the same one, or if it is stopped."
)
TIMEOUT = httpx.Timeout(600.0, connect=10.0)
WAYS = {"plain": False, "speculative": True}
TOP_P = 0.95
# With fewer prompts a stream, a line of the table would end before all streams have run together for a while.
PROMPTS_PER_STREAM = 2
HEAD = ("", "temperature", "streams", "tokens/s", "ratio", "accepted", "length", "gamma", "batch")
DIM, BOLD, RESET = ("\033[2m", "\033[1m", "\033[0m") if sys.stdout.isatty() else ("", "", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    prompts: int = setting(
        4, help=f"Prompts of each line of the table; at least {PROMPTS_PER_STREAM} a stream.", low=1, high=1000
    )
    shown: int = setting(2, help="Prompts that are streamed to the screen.", low=0, high=100)
    max_tokens: int = setting(96, help="Tokens of each completion.", low=1, high=900)
    temperature: tuple[float, ...] = setting((0.0, 0.8), help="Of lines of the table; 0: greedy.", low=0.0, high=100.0)
    concurrency: tuple[int, ...] = setting((1, 8), help="Requests at a time, of lines of the table.", low=1)

    def num_prompts(self, concurrency: int) -> int:
        """Prompts of a table line."""
        return max(self.prompts, PROMPTS_PER_STREAM * concurrency)


class Line(NamedTuple):
    """Measurements of two table lines, one for each way."""

    concurrency: int
    temperature: float


def said_of(temperature: float) -> str:
    """A temperature in words."""
    return f"{temperature:g}" if temperature else "greedy"


@dataclass(slots=True)
class Completion:
    """A request's result: its text, its speed and its speculation record."""

    text: str = ""
    # When each piece came, and the tokens so far.
    pieces: list[tuple[float, int]] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first piece, over the time from it to the last."""
        (first_s, first), (last_s, last) = self.pieces[0], self.pieces[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def num_tokens(self, until_s: float) -> int:
        return max((count for at_s, count in self.pieces if at_s <= until_s), default=0)


@dataclass(frozen=True, slots=True)
class Run:
    """All completions of one line of the table."""

    completions: Sequence[Completion]
    started_s: float
    line: Line

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the time, prompts included, until one of the streams finds no work left.

        With drafts, streams end at different times; tokens of the last ones, which run with fewer others, do not count.
        """
        ends_s = sorted(each.pieces[-1][0] for each in self.completions)
        until_s = ends_s[-min(self.line.concurrency, len(ends_s))]
        return sum(each.num_tokens(until_s) for each in self.completions) / (until_s - self.started_s)

    @property
    def texts(self) -> list[str]:
        return [each.text for each in self.completions]

    def total(self, key: str) -> int:
        return sum(int(each.record.get(key, 0)) for each in self.completions)

    @property
    def exact(self) -> bool:
        """Whether the engine promises the same texts both ways."""
        return all(each.record.get("exact", True) for each in self.completions)

    def row(self, way: str, plain: Run) -> tuple[str, ...]:
        """Its line of the table; the ratio is to `plain`."""
        keys = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
        steps, drafted, accepted = map(self.total, keys)
        shares = (accepted / drafted, 1 + accepted / steps, drafted / steps) if drafted else ()
        batch = fmean(each.record.get("mean_batch_size", 0.0) for each in self.completions)
        return (
            *(way, said_of(self.line.temperature), str(self.line.concurrency)),
            *(f"{self.tokens_per_s:.1f}", f"{self.tokens_per_s / plain.tokens_per_s:.2f}"),
            *([f"{share:.2f}" for share in shares] or "---"),
            f"{batch:.2f}",
        )


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline demo`; exit status 1 when the texts are not as promised, or when it was stopped."""
    config = parse(DemoConfig, argv, os.environ, PROG, DESCRIPTION)
    verdicts: list[bool] = []
    run(until_ctrl_c(partial(_show, config, verdicts), grace_s=FleetSpec().grace_s), prog=PROG)
    raise SystemExit(0 if verdicts == [True] else 1)


async def _show(config: DemoConfig, verdicts: list[bool], started: asyncio.Event, stop: asyncio.Event) -> None:
    """Runs the demo until its end, which adds a verdict, or until `stop`."""
    async with LocalFleet(FleetSpec(**FREE_PORTS), environ=os.environ, say=say) as fleet:
        started.set()
        assert fleet.checkpoints is not None, "the fleet is started"
        say("\n".join(describe_models(fleet.checkpoints)))
        showing = asyncio.create_task(_compare(config, fleet))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({showing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not showing.done():
            showing.cancel()
            return
        verdicts.append(showing.result())


async def _compare(config: DemoConfig, fleet: LocalFleet) -> bool:
    """Streams, measures and prints; says whether the texts are as promised."""
    prompts = unseen_prompts(max(config.shown, *map(config.num_prompts, config.concurrency)))
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=fleet.gateway_url, timeout=TIMEOUT, limits=limits) as client:
        for seed, (prompt, temperature) in enumerate(zip(prompts[: config.shown], cycle(config.temperature))):
            await _show_one(client, config, prompt, seed, temperature)
        # Prompts once untimed: both ways then find them in the prefix cache.
        await measure(client, replace(config, max_tokens=1), prompts, Line(1, 0.0), speculative=False)
        rows: list[Sequence[str]] = [HEAD]
        same = exact = True
        lines = list(starmap(Line, product(config.concurrency, config.temperature)))
        total = len(WAYS) * sum(config.num_prompts(line.concurrency) for line in lines)
        with tqdm(total=total, unit="text", desc="both ways, for the table", leave=False, disable=None) as bar:
            for line in lines:
                asked = prompts[: config.num_prompts(line.concurrency)]
                plain, drafted = [
                    await measure(client, config, asked, line, speculative=on, on_text=bar.update)
                    for on in WAYS.values()
                ]
                rows += [each.row(way, plain) for way, each in zip(WAYS, (plain, drafted), strict=True)]
                same, exact = same and plain.texts == drafted.texts, exact and drafted.exact
    say("\n".join(table(rows)))
    say(f"{DIM}tokens/s: while that many streams ran; ratio: to plain;")
    say("accepted: accepted over verified draft tokens; length: mean acceptance length;")
    say(f"gamma: draft tokens a round; batch: mean number of sessions in a step{RESET}")
    say(f"\n{BOLD}{verdict_of(same, exact)}{RESET}; {os.cpu_count()} cores")
    return same or not exact


def verdict_of(same: bool, exact: bool) -> str:
    """Returns the verdict on the texts.

    Args:
        same: Whether all were identical.
        exact: Whether the engine promises that.
    """
    if same:
        return "all texts identical"
    if exact:
        return "TEXTS DIFFER: please report this"
    return "texts differ, as they may here: on a GPU the distribution of a text is promised, not its tokens"


async def _show_one(client: httpx.AsyncClient, config: DemoConfig, prompt: str, seed: int, temperature: float) -> None:
    for way, speculative in WAYS.items():
        _write(f"\n{BOLD}{way} decoding, {said_of(temperature)}{RESET}\n{DIM}{prompt}{RESET}")
        done = await complete(client, body_of(config, prompt, seed, temperature, speculative), _write)
        say(f"\n{BOLD}{done.tokens_per_s:.0f} tokens/s{RESET}")


async def measure(
    client: httpx.AsyncClient,
    config: DemoConfig,
    prompts: Sequence[str],
    line: Line,
    *,
    speculative: bool,
    on_text: Callable[[], object] = lambda: None,
) -> Run:
    """Completes all prompts, as many at a time as a line says, each with a seed of its own; `on_text` hears of each.

    Raises:
        PacelineError: A request failed; the message is the server's.
    """
    gate = asyncio.Semaphore(line.concurrency)

    async def one(seed: int, prompt: str) -> Completion:
        async with gate:
            done = await complete(client, body_of(config, prompt, seed, line.temperature, speculative))
            on_text()
            return done

    started_s = time.perf_counter()
    completions = await asyncio.gather(*(one(seed, prompt) for seed, prompt in enumerate(prompts)))
    return Run(completions, started_s, line)


def body_of(config: DemoConfig, prompt: str, seed: int, temperature: float, speculative: bool) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": config.max_tokens,
        "temperature": temperature,
        "top_p": TOP_P,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "speculation": {"enabled": speculative},
    }


async def complete(
    client: httpx.AsyncClient, body: dict[str, Any], on_text: Callable[[str], None] = lambda _: None
) -> Completion:
    """Streams one completion.

    Raises:
        PacelineError: It failed; the message is the server's.
    """
    done = Completion()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != httpx.codes.OK:
            raise PacelineError((await response.aread()).decode(errors="replace"))
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _take(done, json.loads(line.removeprefix("data: ")), on_text)
    return done


def _take(done: Completion, event: dict[str, Any], on_text: Callable[[str], None]) -> None:
    if "error" in event:
        raise PacelineError(str(event["error"].get("message", event["error"])))
    text = "".join(choice.get("text", "") for choice in event.get("choices", ()))
    if text:
        done.text += text
        on_text(text)
    if event.get("usage"):
        done.pieces.append((time.perf_counter(), event["usage"]["completion_tokens"]))
    if event.get("metrics"):
        done.record = event["metrics"]["speculative_decoding"]


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
