"""Goodput at three times what a fleet can do, against goodput at what it can do: `make bench NAME=overload`.

First many more requests than there are places, sent at once, show the capacity in requests a second. Then requests
arrive at random at that rate, and at three times that rate, whether earlier ones have ended or not. Goodput is the
tokens a second of requests whose first token came in time. A fleet that takes everything answers nobody in time; this
one refuses at once, and says when to come again, what would wait too long. No request may break off.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from tqdm import tqdm

from loadtest.bench import bench_parser, report, run, show
from loadtest.client import replay
from loadtest.fleet import DEMO_PAIR, bench_fleet
from loadtest.streams import Ask, Completion, GrpcDoor
from loadtest.trial import Trial, rounded_error, take_turns
from paceline.checkpoints.corpus import unseen_prompts

LEAST_RATIO = 0.9
OVERLOAD = 3.0
NUM_PLACES = 16
NUM_PROMPTS = 40
REFUSED = "RESOURCE_EXHAUSTED"
# Rate of arrivals at once.
AT_ONCE_PER_S = 1000.0


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
    run(parser, measure)


async def measure(options: argparse.Namespace) -> bool:
    """Runs the bench; True when goodput holds and nothing broke off."""
    limits: dict[str, Any] = {
        "verifier_arg": (f"--max-num-seqs={NUM_PLACES}",),
        "gateway_arg": (f"--max-wait-s={options.max_wait_s}", "--max-sessions=4096"),
    }
    async with bench_fleet(**DEMO_PAIR, dtype="float32", **limits) as fleet:
        door = GrpcDoor(fleet.endpoint("gateway").second_address)

        async def arrive(count: int, rate_per_s: float, title: str) -> Sequence[Completion]:
            with tqdm(total=count, desc=title, unit="request", leave=False) as bar:
                asks = arrivals(count, rate_per_s, options.max_tokens, options.seed)
                return await replay(door, asks, lambda _: bar.update())

        await arrive(6 * NUM_PLACES, AT_ONCE_PER_S, "warming up")
        capacity = _capacity(await arrive(6 * NUM_PLACES, AT_ONCE_PER_S, "capacity"))

        async def measure_at(times: float) -> Sequence[Completion]:
            rate = times * capacity
            done = await arrive(round(rate * options.seconds), rate, f"{times:g} times capacity")
            await asyncio.sleep(options.in_time_s)
            return done

        runs = await take_turns([1.0, OVERLOAD], measure_at, rounds=options.rounds, title="rates")
        await door.close()
    return _report(options, capacity, runs)


def arrivals(count: int, rate_per_s: float, max_tokens: int, seed: int) -> list[Ask]:
    """Requests that arrive at random, as a Poisson process does."""
    prompts, chance = unseen_prompts(NUM_PROMPTS), random.Random(seed)
    dues = accumulate(chance.expovariate(rate_per_s) for _ in range(count))
    return [
        Ask(prompt=prompts[at % NUM_PROMPTS], max_tokens=max_tokens, temperature=1.0, seed=at, index=at, due_s=due_s)
        for at, due_s in enumerate(dues)
    ]


def _capacity(done: Sequence[Completion]) -> float:
    """Requests a second, from the first end to the last one of those that were taken."""
    ends = sorted(each.ended_s for each in done if not each.error)
    return (len(ends) - 1) / (ends[-1] - ends[0])


def _figures(rounds: Sequence[Sequence[Completion]], in_time_s: float) -> dict[str, float]:
    done = list(itertools.chain.from_iterable(rounds))
    first_s = [each.ttft_s for each in done if not each.error]
    return {
        "requests": len(done),
        "in_time": sum(value <= in_time_s for value in first_s),
        "late": sum(value > in_time_s for value in first_s),
        "refused": sum(each.error == REFUSED for each in done),
        "goodput_tokens_per_s": round(statistics.median(_goodput(each, in_time_s) for each in rounds), 1),
        "first_token_p99_s": round(float(np.quantile(first_s, 0.99)), 2),
    }


def _goodput(done: Sequence[Completion], in_time_s: float) -> float:
    """Tokens a second of requests answered in time, over the whole run."""
    good = sum(each.num_tokens for each in done if not each.error and each.ttft_s <= in_time_s)
    return good / max(each.ended_s for each in done)


def _is_broken(done: Completion) -> bool:
    """Whether it failed, or was refused after it had begun."""
    return done.error not in ("", REFUSED) or (done.error == REFUSED and done.num_tokens > 0)


def _report(options: argparse.Namespace, capacity: float, runs: Mapping[float, Sequence[Sequence[Completion]]]) -> bool:
    rows = {times: _figures(rounds, options.in_time_s) for times, rounds in runs.items()}
    show({"times_capacity": times, **row} for times, row in rows.items())
    broken = sum(_is_broken(each) for rounds in runs.values() for done in rounds for each in done)
    goodput = {times: [_goodput(done, options.in_time_s) for done in rounds] for times, rounds in runs.items()}
    trial = Trial.of(goodput[OVERLOAD], goodput[1.0])
    return report(
        "overload",
        batch_size=NUM_PLACES,
        capacity_per_s=round(capacity, 2),
        goodput_at_capacity=rows[1.0]["goodput_tokens_per_s"],
        goodput_overloaded=rows[OVERLOAD]["goodput_tokens_per_s"],
        ratio=round(trial.ratio, 3),
        error=rounded_error(trial),
        broken=broken,
        ok=trial.meets(least=LEAST_RATIO) and not broken,
    )
