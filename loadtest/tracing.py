"""What traces cost: tokens/s and CPU time a token, without them and at sampling ratios of 0, 0.1 and 1.

Two pairs of fleets, all on the same two cores, a verifier on one and its drafter on the other: in each pair one has no
tracing and one sends its spans to a real collector, a process of its own whose work counts. Fleets take turns, every
other round in the opposite order, and only one is asked at a time. What is sampled is said by the callers
(`traceparent`), so all ratios are measured in the same processes; how far the two fleets without tracing lie apart is
what this machine cannot tell from nothing. Every step verifies as many drafts as any other, so that no controller adds
its choices.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from loadtest.client import Ask, run_batch
from loadtest.collector import new_traceparent
from loadtest.flags import bench_parser
from loadtest.fleet import DEMO_PAIR, OWN_HARDWARE, bench_fleet, machine, widened_target
from loadtest.procfs import cpu_s
from loadtest.trial import Trial, take_turns
from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.local import LocalFleet

OFF = "off"
RATIOS = (0.0, 0.1, 1.0)
# What is to be left of the speed at a sampling ratio.
LEAST = {0.0: 0.99, 0.1: 0.98}
NUM_PAIRS = 2
NUM_PROMPTS = 64
FIXED = json.dumps({"method": "draft_model", "policy": "fixed", "num_speculative_tokens": 3})
ROLES = ("gateway", "verifier", "drafter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One fleet asked in one way: tokens/s while all streams were busy, and CPU time of all its services."""

    tokens_per_s: float
    cpu_ms_per_token: float
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Turns:
    """All turns: by way and pair, one a round."""

    done: Mapping[tuple[str, int], Sequence[Turn]]

    @property
    def same_texts(self) -> bool:
        """Whether every turn gave the same texts."""
        return len({turn.texts for turns in self.done.values() for turn in turns}) == 1

    def trial(self, way: str) -> Trial:
        """Speed of a way over that without tracing, both of all pairs."""
        return Trial.of(self._sums(way, "tokens_per_s"), self._sums(OFF, "tokens_per_s"))

    def figures(self, way: str) -> dict[str, Any]:
        """Medians, and the ratio to no tracing: median of the rounds, with the middle half of them."""
        trial = self.trial(way)
        cpu = self._sums(way, "cpu_ms_per_token")
        low, _, high = statistics.quantiles(trial.ratios, n=4, method="inclusive")
        return {
            "tokens_per_s": round(statistics.median(self._sums(way, "tokens_per_s")) / NUM_PAIRS, 1),
            "cpu_ms_per_token": round(statistics.median(cpu) / NUM_PAIRS, 3),
            "ratio": round(trial.ratio, 4),
            "quartiles": [round(low, 4), round(high, 4)],
            "cpu_ratio": round(Trial.of(cpu, self._sums(OFF, "cpu_ms_per_token")).ratio, 4),
        }

    def apart(self) -> float:
        """Speed of the second fleet without tracing over that of the first, median of the rounds."""
        first, second = ([turn.tokens_per_s for turn in self.done[OFF, pair]] for pair in range(NUM_PAIRS))
        return Trial.of(second, first).ratio

    def _sums(self, way: str, name: str) -> list[float]:
        """A figure of a way, summed over the pairs, round by round."""
        pairs = [self.done[way, pair] for pair in range(NUM_PAIRS)]
        return [sum(getattr(turn, name) for turn in turns) for turns in zip(*pairs, strict=True)]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("tracing", __doc__)
    parser.add_argument("--streams", type=int, default=8, help="requests at a time (default 8)")
    parser.add_argument("--rounds", type=int, default=20, help="rounds, at least 2 (default 20)")
    parser.add_argument("--requests", type=int, default=20, help="requests of a turn (default 20)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a request (default 64)")
    parser.add_argument("--dtype", default="auto", help="weight type (default auto)")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="sampling ratios (default 0 0.1 1)")
    parser.add_argument("--small", action="store_true", help="serve the demo pair unwidened, whose steps are short")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all rounds and prints the table; True when no way costs more than it may."""
    ratios = {f"{100 * ratio:g} %": ratio for ratio in arguments.ratios}
    async with AsyncExitStack() as stack:
        collector = await stack.enter_async_context(collecting())
        pairs = [await _pair(stack, arguments, collector.endpoint) for _ in range(NUM_PAIRS)]
        for fleet in itertools.chain(*pairs):
            await _turn(fleet, OFF, 0.0, arguments)
        turns = Turns(
            await take_turns(
                [(way, pair) for pair in range(NUM_PAIRS) for way in (OFF, *ratios)],
                lambda side: _turn(pairs[side[1]][side[0] != OFF], side[0], ratios.get(side[0], 0.0), arguments),
                rounds=arguments.rounds,
                title="tracing",
            )
        )
    met = all(turns.trial(way).meets(least=LEAST.get(ratio, 0.0)) for way, ratio in ratios.items())
    ok = turns.same_texts and met
    _report({way: turns.figures(way) for way in (OFF, *ratios)}, turns, collector.counted, arguments, ok=ok)
    return ok


async def _pair(stack: AsyncExitStack, arguments: argparse.Namespace, endpoint: str) -> tuple[LocalFleet, LocalFleet]:
    """Starts a fleet without tracing and one that traces what its callers ask for."""
    models = DEMO_PAIR if arguments.small else widened_target("98m")
    settings = {**models, **OWN_HARDWARE, "dtype": arguments.dtype, "speculative_config": FIXED}
    traced = {"otlp_traces_endpoint": endpoint, "trace_sample_ratio": 0.0}
    off = await stack.enter_async_context(bench_fleet(**settings))
    return off, await stack.enter_async_context(bench_fleet(**settings, **traced))


async def _turn(fleet: LocalFleet, way: str, ratio: float, arguments: argparse.Namespace) -> Turn:
    pids = [fleet.pid(role) for role in ROLES]
    before_s = sum(map(cpu_s, pids))
    result = await run_batch(fleet.gateway_url, traced_asks(arguments, ratio), arguments.streams, way)
    used_s = sum(map(cpu_s, pids)) - before_s
    num_tokens = sum(each.num_tokens for each in result.completions)
    return Turn(
        tokens_per_s=result.busy_tokens_per_s,
        cpu_ms_per_token=1e3 * used_s / num_tokens,
        texts=result.texts,
    )


def traced_asks(arguments: argparse.Namespace, ratio: float) -> list[Ask]:
    """Returns the requests of a turn, of which a share is traced, evenly spread."""
    prompts = itertools.islice(itertools.cycle(unseen_prompts(NUM_PROMPTS)), arguments.requests)
    sampled = [int(ratio * (number + 1)) > int(ratio * number) for number in range(arguments.requests)]
    return [
        Ask(
            prompt=prompt,
            max_tokens=arguments.max_tokens,
            seed=seed,
            traceparent=new_traceparent()[1] if sampled[seed] else "",
        )
        for seed, prompt in enumerate(prompts)
    ]


def _report(
    rows: dict[str, dict[str, Any]], turns: Turns, counted: dict[str, int], arguments: argparse.Namespace, *, ok: bool
) -> None:
    for way, row in rows.items():
        low, high = row["quartiles"]
        print(
            f"{way:6} {row['tokens_per_s']:8.1f} tokens/s, to off {row['ratio']:.4f} (middle half {low:.4f} to "
            f"{high:.4f}); CPU {row['cpu_ms_per_token']:.3f} ms a token, to off {row['cpu_ratio']:.4f}"
        )
    print(f"two fleets without tracing, one over the other: {turns.apart():.4f}")
    print(
        f"{arguments.streams} streams, {arguments.requests} requests of {arguments.max_tokens} tokens a turn, "
        f"{arguments.rounds} rounds, {NUM_PAIRS} pairs of fleets; all texts "
        f"{'equal' if turns.same_texts else 'NOT EQUAL'}; {machine()}"
    )
    print(f"collected: {counted['spans']} spans of {counted['traces']} traces in {counted['bytes']} bytes")
    figures = {"ways": rows, "apart": round(turns.apart(), 4), "collected": counted}
    print(json.dumps({"bench": "tracing", "machine": machine(), **figures, "ok": ok}))


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
    command: Sequence[str] = (sys.executable, "-m", "loadtest", "collector", "--port", "0", "--count")
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
