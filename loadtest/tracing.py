"""What traces cost: tokens/s without them, and at sampling ratios of 0, 0.1 and 1: `make bench NAME=tracing`.

One fleet a way, all alike, a verifier on one core and its drafter on the other; they take turns, in another order each
round, and only one is asked at a time. The collector is a real one, in a process of its own on the same machine, and
what it takes of the machine counts. The fleet without traces is measured twice a round: how far these two lie apart is
what this machine cannot tell from nothing. Ratios are to the mean of these two of the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from loadtest.client import Ask, run_batch
from loadtest.fleet import bench_fleet, machine, widened_target
from loadtest.single import OWN_HARDWARE
from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.training.corpus import unseen_prompts

OFF, OFF_AGAIN = "off", "off again"
RATIOS = (0.0, 0.1, 1.0)
# What is to be left of the speed at a sampling ratio.
LEAST = {0.0: 0.99, 0.1: 0.98}
NUM_PROMPTS = 64


@dataclass(slots=True)
class Rates:
    """Tokens/s by way, one number a round; and whether all ways gave the same texts."""

    by_way: dict[str, list[float]] = field(default_factory=dict)
    same_texts: bool = True

    def ratios(self, way: str) -> list[float]:
        """A way over the mean of both measurements without traces, round by round."""
        pairs = zip(self.by_way[OFF], self.by_way[OFF_AGAIN], strict=True)
        return [rate / statistics.fmean(pair) for rate, pair in zip(self.by_way[way], pairs, strict=True)]

    def figures(self, way: str) -> dict[str, Any]:
        """Median and spread of the ratios, and the median rate."""
        ratios = self.ratios(way)
        return {
            "tokens_per_s": round(statistics.median(self.by_way[way]), 1),
            "ratio": round(statistics.median(ratios), 4),
            "least": round(min(ratios), 4),
            "most": round(max(ratios), 4),
        }


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = argparse.ArgumentParser(
        prog="tracing", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--rounds", type=int, default=10, help="rounds (default 10)")
    parser.add_argument("--requests", type=int, default=64, help="requests of a way and round (default 64)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a request (default 64)")
    parser.add_argument("--dtype", default="auto", help="weight type (default auto)")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="sampling ratios (default 0 0.1 1)")
    parser.add_argument("--small", action="store_true", help="serve the demo pair unwidened, whose steps are short")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all rounds and prints the table; True when no way costs more than it may."""
    models = {"model": DEMO_TARGET, "draft_model": DEMO_DRAFTER} if arguments.small else widened_target("98m")
    settings = {**models, **OWN_HARDWARE, "dtype": arguments.dtype}
    ratios = {f"{100 * ratio:g} %": ratio for ratio in arguments.ratios}
    rates = Rates(by_way={way: [] for way in (OFF, *ratios, OFF_AGAIN)})
    async with AsyncExitStack() as stack:
        collector = await stack.enter_async_context(collecting())
        urls = {}
        for way, ratio in {OFF: None, **ratios}.items():
            traced = {} if ratio is None else {"otlp_traces_endpoint": collector.endpoint, "trace_sample_ratio": ratio}
            fleet = await stack.enter_async_context(bench_fleet(**settings, **traced))
            urls[way] = fleet.gateway_url
        urls[OFF_AGAIN] = urls[OFF]
        await _rounds(urls, rates, arguments)
    ok = rates.same_texts and all(rates.figures(way)["ratio"] >= LEAST.get(ratio, 0.0) for way, ratio in ratios.items())
    _report(rates, collector.counted, arguments, ok=ok)
    return ok


async def _rounds(urls: dict[str, str], rates: Rates, arguments: argparse.Namespace) -> None:
    asks = _asks(arguments.requests, arguments.max_tokens)
    for way, url in urls.items():
        if way != OFF_AGAIN:
            await run_batch(
                url, _asks(min(NUM_PROMPTS, arguments.requests), 2), arguments.streams, f"warming up, {way}"
            )
    ways = list(urls)
    with tqdm(total=arguments.rounds * len(ways), desc="tracing", unit="way") as bar:
        for number in range(arguments.rounds):
            texts = []
            shift = number % len(ways)
            for way in ways[shift:] + ways[:shift]:
                result = await run_batch(urls[way], asks, arguments.streams, way)
                rates.by_way[way].append(result.busy_tokens_per_s)
                texts.append([each.text for each in result.completions])
                bar.update()
            rates.same_texts = rates.same_texts and all(each == texts[0] for each in texts)


def _asks(count: int, max_tokens: int) -> list[Ask]:
    prompts = itertools.islice(itertools.cycle(unseen_prompts(NUM_PROMPTS)), count)
    return [Ask(prompt=prompt, max_tokens=max_tokens, seed=seed) for seed, prompt in enumerate(prompts)]


def _report(rates: Rates, counted: dict[str, int], arguments: argparse.Namespace, *, ok: bool) -> None:
    rows = {way: rates.figures(way) for way in rates.by_way}
    for way, row in rows.items():
        print(f"{way:9} {row['tokens_per_s']:8.1f} tokens/s  ratio to off {row['ratio']:.4f} "
              f"({row['least']:.4f} to {row['most']:.4f})")  # fmt: skip
    print(
        f"{arguments.streams} streams, {arguments.requests} requests of {arguments.max_tokens} tokens a way and round, "
        f"{arguments.rounds} rounds; all texts {'equal' if rates.same_texts else 'NOT EQUAL'}; {machine()}"
    )
    print(f"collected: {counted['spans']} spans of {counted['traces']} traces in {counted['bytes']} bytes")
    print(json.dumps({"bench": "tracing", "machine": machine(), "ways": rows, "collected": counted, "ok": ok}))


@dataclass(slots=True)
class Collecting:
    """A collector in a process of its own; what it counted is known when it has ended."""

    endpoint: str
    counted: dict[str, int] = field(default_factory=dict)


@asynccontextmanager
async def collecting() -> AsyncIterator[Collecting]:
    """Runs a collector while a block runs.

    Raises:
        RuntimeError: It did not start.
    """
    command: Sequence[str] = (sys.executable, "-m", "loadtest.collector", "--port", "0", "--count")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None, "it was asked for"
    try:
        async with asyncio.timeout(60):
            endpoint = (await process.stdout.readline()).decode().strip()
        if not endpoint:
            raise RuntimeError("the collector did not start")
        running = Collecting(endpoint=endpoint)
        yield running
        process.terminate()
        async with asyncio.timeout(60):
            running.counted = json.loads(await process.stdout.read())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


if __name__ == "__main__":
    main()
