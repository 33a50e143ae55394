"""Goodput at three times what a fleet can do, against goodput at what it can do.

First as many streams as there are places, each at once followed by the next, tell the capacity in requests a second.
Then requests arrive at random at that rate, and at three times that rate, whether earlier ones have ended or not.
Goodput is the tokens a second of requests whose first token came in time. A fleet that takes everything answers nobody
in time; this one refuses at once, with the time to come again, what would wait too long. No request may break off.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from loadtest.flags import bench_parser
from loadtest.fleet import DEMO_PAIR, bench_fleet, machine
from loadtest.openloop import Load, Opened, open_loop
from loadtest.trial import Trial, rounded_error, take_turns

LEAST_RATIO = 0.9
OVERLOAD = 3.0
NUM_PLACES = 16
REFUSED = "RESOURCE_EXHAUSTED"


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("overload", __doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="time of arrivals at each rate (default 30)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens a request (default 64)")
    parser.add_argument(
        "--in-time-s", type=float, default=4.0, help="a first token later than that is late (default 4)"
    )
    parser.add_argument("--max-wait-s", type=float, default=2.0, help="the gateway's --max-wait-s (default 2)")
    parser.add_argument("--rounds", type=int, default=1, help="runs at both rates, in turn (default 1)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals (default 1)")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


async def measure(options: argparse.Namespace) -> bool:
    """Runs the bench; True when goodput holds and nothing broke off."""
    settings = {
        **DEMO_PAIR,
        "dtype": "float32",
        "verifier_arg": (f"--max-num-seqs={NUM_PLACES}",),
        "gateway_arg": (f"--max-wait-s={options.max_wait_s}", "--max-sessions=4096"),
    }
    async with bench_fleet(**settings) as fleet:
        address = fleet.endpoint("gateway").second_address
        full = Load(num_requests=6 * NUM_PLACES, rate_per_s=1000.0, max_tokens=options.max_tokens)
        await open_loop(address, full, "warming up")
        capacity = _capacity(await open_loop(address, full, "capacity"))

        async def measure_at(times: float) -> Sequence[Opened]:
            rate = times * capacity
            count = round(rate * options.seconds)
            load = Load(num_requests=count, rate_per_s=rate, max_tokens=options.max_tokens, seed=options.seed)
            opened = await open_loop(address, load, f"{times:g} times capacity")
            await asyncio.sleep(options.in_time_s)
            return opened

        runs = await take_turns([1.0, OVERLOAD], measure_at, rounds=options.rounds, title="rates")
    return _report(options, capacity, runs)


def _capacity(opened: Sequence[Opened]) -> float:
    """Requests a second, from the first end to the last one of those that were taken."""
    ends = sorted(each.ended_s for each in opened if not each.code)
    return (len(ends) - 1) / (ends[-1] - ends[0])


def _goodput(opened: Sequence[Opened], in_time_s: float) -> float:
    """Tokens a second of requests answered in time, over the whole run."""
    good = sum(each.num_generated for each in opened if not each.code and each.first_token_s <= in_time_s)
    return good / max(each.ended_s for each in opened)


def _is_broken(opened: Opened) -> bool:
    """Whether it failed, or was refused after it had begun."""
    return opened.code not in ("", REFUSED) or (opened.code == REFUSED and opened.num_generated > 0)


def _report(options: argparse.Namespace, capacity: float, runs: Mapping[float, Sequence[Sequence[Opened]]]) -> bool:
    goodput = {times: [_goodput(opened, options.in_time_s) for opened in rounds] for times, rounds in runs.items()}
    print("times capacity  requests  in time  late  refused  goodput tokens/s  first token p99")
    for times, rounds in runs.items():
        opened = list(itertools.chain.from_iterable(rounds))
        first_s = [each.first_token_s for each in opened if not each.code]
        in_time = sum(value <= options.in_time_s for value in first_s)
        num_refused = sum(each.code == REFUSED for each in opened)
        print(
            f"{times:14g}  {len(opened):8}  {in_time:7}  {len(first_s) - in_time:4}  {num_refused:7}  "
            f"{statistics.median(goodput[times]):16.1f}  {np.quantile(first_s, 0.99):13.2f} s"
        )
    broken = sum(_is_broken(each) for rounds in runs.values() for opened in rounds for each in opened)
    trial = Trial.of(goodput[OVERLOAD], goodput[1.0])
    ok = trial.meets(least=LEAST_RATIO) and not broken
    figures = {
        "bench": "overload",
        "machine": machine(),
        "batch_size": NUM_PLACES,
        "capacity_per_s": round(capacity, 2),
        "goodput_at_capacity": round(statistics.median(goodput[1.0]), 1),
        "goodput_overloaded": round(statistics.median(goodput[OVERLOAD]), 1),
        "ratio": round(trial.ratio, 3),
        "error": rounded_error(trial),
        "broken": broken,
        "ok": ok,
    }
    print(json.dumps(figures))
    return ok
