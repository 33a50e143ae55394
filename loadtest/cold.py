"""The first load of a fresh fleet, with the drafter tier and without it: `make bench NAME=cold`.

Every measurement starts a new fleet, which has learned nothing: neither what a guess is worth, nor what a step costs
beyond what verifiers measure at start. Each fleet serves the first two requests of each stream. Fleets with and without
the tier take turns on the same cores, every other pair in the opposite order. A fleet without the tier has both cores
for its verifier, as users would have it.

Tokens/s over all streams while all are busy. OK when from 8 streams on the median of the pairs is 0.97 or more and none
is below 0.94, and one stream is 2.0 times as fast greedy and 1.5 times sampled, medians within their standard errors;
and no text differs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from loadtest.bench import Table, bench_parser, report, run
from loadtest.client import BatchResult, asks_of, joined, run_batch, same_texts
from loadtest.fleet import bench_fleet, widened_target
from loadtest.trial import Trial, rounded_error, take_turns

LOADS = (1, 4, 8, 16)
TEMPERATURES = (0.0, 0.8)
REQUESTS_PER_STREAM = 2
# The goals: from that number of streams on, for the median and for each pair; and for one stream, by temperature.
MANY, LEAST_MEDIAN, LEAST = 8, 0.97, 0.94
LEAST_ALONE = {0.0: 2.0, 0.8: 1.5}


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("cold", __doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=LOADS, help="loads (default 1 4 8 16)")
    parser.add_argument("--temperature", type=float, nargs="+", default=TEMPERATURES, help="(default 0 0.8)")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of fleets at each load (default 4)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a request (default 64)")
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all loads and prints the table; True when every goal is met."""
    table, rows = Table(), []
    loads = list(itertools.product(arguments.temperature, arguments.streams))
    for temperature, streams in tqdm(loads, desc="loads", unit="load", leave=False):
        rows.append(row_of(streams, temperature, await _measure_load(streams, temperature, arguments)))
        table.add(rows[-1])
    return report("cold", target="98m", loads=rows, ok=all(row["ok"] for row in rows))


async def _measure_load(
    streams: int, temperature: float, arguments: argparse.Namespace
) -> Mapping[bool, Sequence[BatchResult]]:
    asks = asks_of(REQUESTS_PER_STREAM * streams, arguments.max_tokens, temperature)

    async def measure_fresh(tier: bool) -> BatchResult:
        async with bench_fleet(**widened_target("98m"), drafter=tier) as fleet:
            return await run_batch(fleet.gateway_url, asks, streams, f"{streams} streams")

    return await take_turns([True, False], measure_fresh, rounds=arguments.pairs, title=f"{streams} streams")


def row_of(streams: int, temperature: float, results: Mapping[bool, Sequence[BatchResult]]) -> dict[str, Any]:
    """Figures of one load; `results` are those of the fleets with the tier (True) and without, pair by pair."""
    with_tier, without = ([each.busy_tokens_per_s for each in results[tier]] for tier in (True, False))
    trial, tier = Trial.of(with_tier, without), joined(results[True])
    same = same_texts(itertools.chain.from_iterable(results.values()))
    met = True
    if streams >= MANY:
        met = trial.meets(least=LEAST_MEDIAN) and min(trial.ratios) >= LEAST
    elif streams == 1:
        met = trial.meets(least=LEAST_ALONE.get(temperature, 1.0))
    return {
        "streams": streams,
        "temperature": temperature,
        "ratio": round(trial.ratio, 3),
        "error": rounded_error(trial),
        "least": round(min(trial.ratios), 3),
        "ratios": [round(ratio, 3) for ratio in trial.ratios],
        "gamma": round(tier.per("num_draft_tokens", "num_steps"), 2),
        "same_texts": same,
        "ok": same and met,
    }
