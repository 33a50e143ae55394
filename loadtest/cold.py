"""The first load of a fresh fleet, with the drafter tier and without it: `make bench NAME=cold`.

Fleets are started anew for every measurement, so that nobody has learned anything: not what a guess is worth, nor what
a step costs beyond what verifiers measure at start. Each serves the first two requests of so many streams. Fleets with
and without the tier take turns on the same two cores, every other pair in the opposite order. A fleet without the tier
has both cores for its verifier, as users would have it.

Tokens/s over all streams while all are busy. OK when from 8 streams on the median of the pairs is 0.97 or more and none
is below 0.94, and one stream is 2.0 times as fast greedy and 1.5 times sampled; and no text differs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from loadtest.client import Ask, BatchResult, run_batch
from loadtest.fleet import bench_fleet, machine, widened_target
from paceline.training.corpus import unseen_prompts

LOADS = (1, 4, 8, 16)
TEMPERATURES = (0.0, 0.8)
REQUESTS_PER_STREAM = 2
# What is asked from so many streams on, of the median and of each pair; and of one stream, by temperature.
MANY, LEAST_MEDIAN, LEAST = 8, 0.97, 0.94
LEAST_ALONE = {0.0: 2.0, 0.8: 1.5}


@dataclass(slots=True)
class Row:
    """One load: what fleets did with the tier and without, pair by pair."""

    streams: int
    temperature: float
    tier: list[BatchResult] = field(default_factory=list)
    plain: list[BatchResult] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Tokens/s with the tier over those without, of each pair."""
        pairs = zip(self.tier, self.plain, strict=True)
        return [tier.busy_tokens_per_s / plain.busy_tokens_per_s for tier, plain in pairs]

    @property
    def same_texts(self) -> bool:
        """Whether all fleets said the same."""
        texts = [[each.text for each in result.completions] for result in (*self.tier, *self.plain)]
        return all(each == texts[0] for each in texts)

    @property
    def ok(self) -> bool:
        """Whether what is asked of this load is met; nothing but equal texts is between one stream and many."""
        median = statistics.median(self.ratios)
        if self.streams >= MANY:
            return self.same_texts and median >= LEAST_MEDIAN and min(self.ratios) >= LEAST
        return self.same_texts and (self.streams > 1 or median >= LEAST_ALONE.get(self.temperature, 1.0))

    def figures(self) -> dict[str, Any]:
        """What goes into the table and the last line."""
        steps = sum(result.total("num_steps") for result in self.tier)
        drafted = sum(result.total("num_draft_tokens") for result in self.tier)
        return {
            "streams": self.streams,
            "temperature": self.temperature,
            "ratio": round(statistics.median(self.ratios), 3),
            "least": round(min(self.ratios), 3),
            "ratios": [round(ratio, 3) for ratio in self.ratios],
            "gamma": round(drafted / max(1, steps), 2),
            "same_texts": self.same_texts,
            "ok": self.ok,
        }


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = argparse.ArgumentParser(
        prog="cold", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=LOADS, help="loads (default 1 4 8 16)")
    parser.add_argument("--temperature", type=float, nargs="+", default=TEMPERATURES, help="(default 0 0.8)")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of fleets at each load (default 4)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a request (default 64)")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all loads and prints the table; True when every ratio is met."""
    loads = list(itertools.product(arguments.temperature, arguments.streams))
    figures = []
    for temperature, streams in tqdm(loads, desc="loads", unit="load", leave=False):
        row = Row(streams=streams, temperature=temperature)
        for number in range(arguments.pairs):
            await _pair(row, arguments.max_tokens, reverse=number % 2 == 1)
        figures.append(row.figures())
        print(_line(figures[-1]), flush=True)
    ok = all(each["ok"] for each in figures)
    print(json.dumps({"bench": "cold", "target": "98m", "machine": machine(), "loads": figures, "ok": ok}))
    return ok


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['streams']:3} streams  temperature {row['temperature']:g}  with over without {row['ratio']:5.2f}  "
        f"{' '.join(f'{ratio:.2f}' for ratio in row['ratios'])}  gamma {row['gamma']:5.2f}"
    )


async def _pair(row: Row, max_tokens: int, *, reverse: bool) -> None:
    ways: list[tuple[list[BatchResult], dict[str, Any]]] = [(row.tier, {}), (row.plain, {"drafter": False})]
    for results, settings in ways[::-1] if reverse else ways:
        async with bench_fleet(**widened_target("98m"), **settings) as fleet:
            asks = _asks(REQUESTS_PER_STREAM * row.streams, max_tokens, row.temperature)
            results.append(await run_batch(fleet.gateway_url, asks, row.streams, f"{row.streams} streams"))


def _asks(count: int, max_tokens: int, temperature: float) -> Sequence[Ask]:
    return [
        Ask(prompt=prompt, max_tokens=max_tokens, temperature=temperature, seed=seed)
        for seed, prompt in enumerate(unseen_prompts(count))
    ]


if __name__ == "__main__":
    main()
