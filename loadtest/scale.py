"""The real fleet at a GPU's pace: simulated devices at 1 to 256 streams: `make bench NAME=scale`.

Gateway, verifier, drafter and Valkey are the processes that serve; only the devices are simulated: a step takes the
time that the profile says, and nothing is computed. So what is measured is whether our own code keeps up with such
devices.
At every load plain decoding (by request) and the tier take turns, on one fleet. In the table:

* ideal: what `paceline plan`'s simulation gives for the same profile and load, where code costs nothing; share: of it
* cpu_ms: CPU time of each process for a step of the verifier, in milliseconds; client: this one's
* gap_p50_ms, gap_p99_ms: between tokens, those that came at once sharing their wait
* busiest: the process that took most CPU, and its share of one core: near 1 it is the limit, or this machine is

Figures of one machine: client, gateway and services share its cores, as they would not in a cluster. The bench is met
when all ways give the same texts.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from loadtest.bench import Table, bench_parser, report, run
from loadtest.client import BatchResult, run_batch, same_texts
from loadtest.fleet import bench_fleet
from loadtest.streams import Ask
from paceline.cluster.local import LocalFleet
from paceline.core.draft_policy import Goodput
from paceline.planning.drafter import DrafterProcess
from paceline.planning.events import Events
from paceline.planning.simulation import Outcome
from paceline.planning.verifier import Request, SimulatedVerifier
from paceline.simulated.guesses import DrawnGuesses, texts_of
from paceline.simulated.model import find_profile, guesses_at
from paceline.simulated.profile import Profile
from tools.procfs import cpu_s
from tools.scrape import mean_between, scrape

PROFILES = ("70b+1b@4xh100+l4", "8b+0.5b@h100+l4")
LOADS = (1, 8, 32, 64, 128, 256)
PLAIN, TIER = "plain", "tier"
REQUESTS_PER_STREAM, PROMPT_TOKENS = 2, 16
ROLES = ("verifier", "drafter", "gateway")
IDEAL_S, WARM_UP = 40.0, 0.5
STEPS = "paceline:step_seconds"


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("scale", __doc__)
    parser.add_argument("--profiles", nargs="+", default=PROFILES, help="as of paceline up --simulate")
    parser.add_argument("--streams", nargs="+", type=int, default=LOADS, help="loads (default 1 to 256)")
    parser.add_argument("--max-tokens", type=int, default=160, help="mean tokens of a text (default 160)")
    parser.add_argument("--rounds", type=int, default=2, help="of each way at each load (default 2)")
    parser.add_argument("--acceptance", type=float, help="chance that a first guess is right (default: the profile's)")
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all profiles; True when texts did not depend on the way."""
    table, rows = Table(), []
    for name in arguments.profiles:
        profile = find_profile(name)
        async with bench_fleet(simulate=name, acceptance=arguments.acceptance) as fleet:
            await run_batch(fleet.gateway_url, asks_of(8, arguments.max_tokens, TIER), 8, "warming up")
            for streams in arguments.streams:
                for row in await measure_load(fleet, profile, streams, arguments):
                    table.add(row)
                    rows.append(row)
    return report("scale", simulated=True, rows=rows, ok=all(row["same_texts"] for row in rows))


async def measure_load(
    fleet: LocalFleet, profile: Profile, streams: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Runs both ways by turns at one load; returns a row for each."""
    measured: dict[str, list[Measured]] = {PLAIN: [], TIER: []}
    for number in range(arguments.rounds):
        for way in (PLAIN, TIER) if number % 2 == 0 else (TIER, PLAIN):
            asks = asks_of(REQUESTS_PER_STREAM * streams, arguments.max_tokens, way)
            measured[way].append(await measure_way(fleet, asks, streams, f"{profile.name}, {streams} {way}"))
    same = same_texts(each.result for results in measured.values() for each in results)
    return [
        {"profile": profile.name, "streams": streams, "way": way}
        | figures(results, ideal(profile, streams, arguments, way))
        | {"same_texts": same}
        for way, results in measured.items()
    ]


def asks_of(count: int, mean_tokens: int, way: str) -> list[Ask]:
    """Requests of half to one and a half times as many tokens; equal ones would start and end in lockstep."""
    lengths = random.Random(0)
    return [
        Ask(
            prompt=f"request number {number} of this load, and ",
            max_tokens=lengths.randint(mean_tokens // 2, mean_tokens * 3 // 2),
            seed=number,
            speculation=None if way == TIER else {"enabled": False},
            more={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        )
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One batch.

    Attributes:
        cpu_s: CPU time by process.
        num_steps: Of the verifier.
        step_s: Their mean time.
    """

    result: BatchResult
    cpu_s: Mapping[str, float]
    num_steps: float
    step_s: float


async def measure_way(fleet: LocalFleet, asks: Sequence[Ask], streams: int, title: str) -> Measured:
    """Runs a batch, and notes what it cost."""
    pids = {**{role: fleet.pid(role) for role in ROLES}, "client": os.getpid()}
    address = fleet.endpoint("verifier").second_address
    before, taken = await scrape(address), {name: cpu_s(pid) for name, pid in pids.items()}
    result = await run_batch(fleet.gateway_url, asks, streams, title)
    spent = {name: cpu_s(pid) - taken[name] for name, pid in pids.items()}
    after = await scrape(address)
    num_steps = after[f"{STEPS}_count"] - before.get(f"{STEPS}_count", 0.0)
    return Measured(result=result, cpu_s=spent, num_steps=num_steps, step_s=mean_between(STEPS, [(before, after)]))


def figures(measured: Sequence[Measured], ideal_tokens_per_s: float) -> dict[str, Any]:
    """What goes into the table for one way at one load."""
    speeds = [each.result.busy_tokens_per_s for each in measured]
    gaps = [gap for each in measured for done in each.result.completions for gap in done.token_gaps_s]
    p50, p99 = np.percentile(gaps, (50, 99)) if gaps else (0.0, 0.0)
    last = measured[-1]
    busiest = max(last.cpu_s, key=last.cpu_s.__getitem__)
    tokens_per_s = statistics.median(speeds)
    return {
        "tokens_per_s": round(tokens_per_s, 1),
        "spread": round((max(speeds) - min(speeds)) / tokens_per_s, 3),
        "ideal": round(ideal_tokens_per_s, 1),
        "share": round(tokens_per_s / ideal_tokens_per_s, 3),
        "step_ms": round(1e3 * last.step_s, 2),
        "cpu_ms": {name: round(1e3 * spent / max(1.0, last.num_steps), 2) for name, spent in last.cpu_s.items()},
        "gap_p50_ms": round(1e3 * float(p50), 2),
        "gap_p99_ms": round(1e3 * float(p99), 2),
        "length": round(last.result.mean_acceptance_length, 2),
        "busiest": f"{busiest} {last.cpu_s[busiest] / last.result.seconds:.2f}",
    }


def ideal(profile: Profile, streams: int, arguments: argparse.Namespace, way: str) -> float:
    """Tokens/s of the same devices in simulated time, where our code takes none."""
    truth = profile.truth if arguments.acceptance is None else guesses_at(arguments.acceptance)
    profile = replace(profile, truth=texts_of(truth) if isinstance(truth, DrawnGuesses) else truth)
    events, requests, lengths = Events(0), list[Request](), random.Random(0)

    def ask() -> None:
        length = lengths.randint(arguments.max_tokens // 2, arguments.max_tokens * 3 // 2)
        number = len(requests)
        requests.append(
            Request(number=number, at_s=events.now_s, num_prompt_tokens=PROMPT_TOKENS, num_output_tokens=length)
        )
        verifier.submit(requests[-1])

    drafters = [DrafterProcess("drafter", profile, events)] if way == TIER else []
    verifier = SimulatedVerifier(
        profile,
        events,
        colocated=False,
        drafters=drafters,
        on_end=lambda _: events.after(0.0, ask),
        policy=Goodput(max_nodes=profile.most_nodes),
    )
    cost = profile.target.starting_cost()
    verifier.policy.start_from(cost)
    for _ in range(streams):
        ask()
    events.run(IDEAL_S)
    return Outcome(requests=requests, door_s=0.0, since_s=WARM_UP * IDEAL_S, until_s=IDEAL_S).tokens_per_s


if __name__ == "__main__":
    main()
