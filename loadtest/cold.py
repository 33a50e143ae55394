"""The first load of a fresh fleet, with the drafter tier and without it: `make bench NAME=cold`.

Fleets are started anew for every measurement, so that nobody has learned anything: not what a guess is worth, nor what
a step costs beyond what verifiers measure at start. Each serves the first two requests of so many streams. Fleets with
and without the tier take turns on the same two cores, every other pair in the opposite order. A fleet without the tier
has both cores for its verifier, as users would have it.

Tokens/s over all streams while all are busy. OK when from 8 streams on the median of the pairs is 0.97 or more and none
is below 0.94, and one stream is 2.0 times as fast greedy and 1.5 times sampled, medians within their standard errors;
and no text differs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from loadtest.client import BatchResult, asks_of, joined, run_batch, same_texts
from loadtest.flags import bench_parser
from loadtest.fleet import bench_fleet, machine, widened_target
from loadtest.trial import Trial, rounded_error, take_turns

LOADS = (1, 4, 8, 16)
TEMPERATURES = (0.0, 0.8)
REQUESTS_PER_STREAM = 2
# What is asked from so many streams on, of the median and of each pair; and of one stream, by temperature.
MANY, LEAST_MEDIAN, LEAST = 8, 0.97, 0.94
LEAST_ALONE = {0.0: 2.0, 0.8: 1.5}


@dataclass(frozen=True, slots=True)
class Row:
    """One load: what fleets did with the tier and without (by that), pair by pair."""

    streams: int
    temperature: float
    results: Mapping[bool, Sequence[BatchResult]]

    @property
    def trial(self) -> Trial:
        """Tokens/s with the tier over those without."""
        with_tier, without = ([each.busy_tokens_per_s for each in self.results[tier]] for tier in (True, False))
        return Trial.of(with_tier, without)

    @property
    def same_texts(self) -> bool:
        """Whether all fleets said the same."""
        return same_texts(itertools.chain.from_iterable(self.results.values()))

    @property
    def ok(self) -> bool:
        """Whether what is asked of this load is met; nothing but equal texts is between one stream and many."""
        trial = self.trial
        if self.streams >= MANY:
            return self.same_texts and trial.meets(least=LEAST_MEDIAN) and min(trial.ratios) >= LEAST
        alone = trial.meets(least=LEAST_ALONE.get(self.temperature, 1.0))
        return self.same_texts and (self.streams > 1 or alone)

    def figures(self) -> dict[str, Any]:
        """What goes into the table and the last line."""
        tier, ratios = joined(self.results[True]), self.trial.ratios
        return {
            "streams": self.streams,
            "temperature": self.temperature,
            "ratio": round(self.trial.ratio, 3),
            "error": rounded_error(self.trial),
            "least": round(min(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "gamma": round(tier.total("num_draft_tokens") / max(1, tier.total("num_steps")), 2),
            "same_texts": self.same_texts,
            "ok": self.ok,
        }


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("cold", __doc__)
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
        row = await _row(streams, temperature, arguments)
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


async def _row(streams: int, temperature: float, arguments: argparse.Namespace) -> Row:
    asks = asks_of(REQUESTS_PER_STREAM * streams, arguments.max_tokens, temperature)

    async def measure_fresh(tier: bool) -> BatchResult:
        async with bench_fleet(**widened_target("98m"), **({} if tier else {"drafter": False})) as fleet:
            return await run_batch(fleet.gateway_url, asks, streams, f"{streams} streams")

    results = await take_turns([True, False], measure_fresh, rounds=arguments.pairs, title=f"{streams} streams")
    return Row(streams, temperature, results)
