"""Measures the profile of the demo pair on this machine that `paceline plan` and its bench stand on.

  python -m loadtest facts --out profile.json

Three parts. In this process, on one core: what steps of both engines take by rows and sessions, and what the drafter
guesses along the target's own texts. In a fleet with a core for the verifier and one for the drafter: what a plain step
takes at 1, 4 and 16 streams, whose difference to the engine alone is the rest of the service (its event loop, the
gateway, this client), and the round trip to the drafter. And one calibration: steps take longer while the drafter
works by so much that the simulator meets the fleet's tokens/s at 2 and 4 streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from loadtest.closedloop import Prompts, closed_loop, simulated_loop
from loadtest.engine_costs import MAX_ROWS, NUM_BLOCKS, EnginesInTurn, Sample, fit
from loadtest.flags import bench_parser
from loadtest.fleet import OWN_HARDWARE, bench_fleet, machine, widened_target
from loadtest.scrape import MeanOf, scrape
from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.local import LocalFleet
from paceline.core.pages import BLOCK_SIZE
from paceline.core.step_time import StepCost
from paceline.planning.guesses import RecordedGuesses, RecordedPlace
from paceline.planning.profile import MEASURED, DeviceFacts, DrafterFacts, Profile, write_profile
from paceline.planning.simulation import Fleet, Outcome, Way

NUM_PROMPTS = 32
# Streams, nodes a session and tokens of the runs that steps are timed in.
RUNS = ((1, 0, 32), (8, 0, 16), (32, 0, 12), (1, 8, 64), (4, 3, 48), (4, 12, 32), (16, 2, 24), (32, 1, 16), (32, 4, 12))
PLAIN_STREAMS, CALIBRATION_STREAMS = (1, 4, 16), (2, 4)
REQUESTS_PER_STREAM = 3
LEAST_LINK_S, MOST_OVERHEAD = 5e-5, 1.0
# Look-up has no part in the simulation, so it has none in what it is compared with.
SPECULATIVE_CONFIG = json.dumps({"method": "draft_model"})


def main() -> None:
    """Parses the command line, measures and writes the profile."""
    parser = bench_parser("facts", __doc__)
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("profile.json"), help="file to write (default profile.json)")
    arguments = parser.parse_args()
    profile = asyncio.run(_measure_alone(arguments))
    write_profile(profile, arguments.out)
    print(f"wrote {arguments.out}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of every bench that measures a profile."""
    parser.add_argument("--dtype", default="auto", help="weight type of the fleet (default auto)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a request (default 64)")


async def _measure_alone(arguments: argparse.Namespace) -> Profile:
    prompts = bench_prompts()
    engines = measure_engines(prompts, arguments)
    async with profile_fleet(arguments) as fleet:
        return await measure_fleet(fleet, engines, prompts, arguments)


def profile_fleet(arguments: argparse.Namespace) -> LocalFleet:
    """A verifier on one core and its drafter on the other, as on machines of their own."""
    settings = widened_target("98m")
    return bench_fleet(**settings, **OWN_HARDWARE, dtype=arguments.dtype, speculative_config=SPECULATIVE_CONFIG)


def bench_prompts() -> list[list[int]]:
    """Prompts of whole blocks and a token: cached, their step computes that token and nothing else."""
    tokenizer = Tokenizer.from_file(str(widened_target("98m")["model"] / "tokenizer.json"))
    encoded = [tokenizer.encode(prompt).ids for prompt in unseen_prompts(NUM_PROMPTS)]
    return [ids[: (len(ids) - 1) // BLOCK_SIZE * BLOCK_SIZE + 1] for ids in encoded]


def measure_engines(prompts: Prompts, arguments: argparse.Namespace) -> Profile:
    """Times both engines in this process; what a fleet adds is still missing."""
    settings = widened_target("98m")
    cpus, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {min(cpus)})
    torch.set_num_threads(1)
    try:
        engines = EnginesInTurn(settings["model"], settings["draft_model"], arguments.dtype)
        target: list[Sample] = []
        drafter: list[Sample] = []
        for streams, gamma, max_tokens in tqdm(RUNS, desc="timing steps", unit="run", leave=False):
            turns = engines.run(prompts[:streams], max_tokens=max_tokens, gamma=gamma)
            target += turns.target
            drafter += turns.drafter
        places = _record(engines, prompts, arguments.max_tokens)
    finally:
        os.sched_setaffinity(0, cpus)
        torch.set_num_threads(threads)
    return _profile(fit(target), fit(drafter), places)


def _record(engines: EnginesInTurn, prompts: Prompts, max_tokens: int) -> list[list[RecordedPlace]]:
    texts = engines.run(prompts, max_tokens=max_tokens, gamma=0).texts
    pairs = zip(prompts, texts, strict=True)
    bar = tqdm(pairs, total=len(prompts), desc="recording guesses", unit="text", leave=False)
    return [engines.record(prompt, text) for prompt, text in bar]


def _profile(
    target: tuple[StepCost, float], drafter: tuple[StepCost, float], places: Sequence[Sequence[RecordedPlace]]
) -> Profile:
    draft_device = DeviceFacts(
        name="one core", cost=drafter[0], session_s=drafter[1], max_sessions=256, max_rows=256, kv_tokens=65_536
    )
    return Profile(
        name="demo pair, a core each",
        kind=MEASURED,
        origin=f"python -m loadtest facts on {machine()}",
        target=DeviceFacts(
            name="one core",
            cost=target[0],
            session_s=target[1],
            kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
            max_sessions=64,
            max_rows=MAX_ROWS,
        ),
        drafter=DrafterFacts(device=draft_device),
        colocated=DrafterFacts(device=draft_device),
        colocated_kv_tokens=NUM_BLOCKS * BLOCK_SIZE,
        truth=RecordedGuesses(places),
    )


async def measure_fleet(
    fleet: LocalFleet, engines: Profile, prompts: Prompts, arguments: argparse.Namespace
) -> Profile:
    """Adds what the fleet around the engines costs."""
    address = fleet.endpoint("gateway").second_address
    for speculation in (False, True):
        await closed_loop(address, prompts, max_tokens=4, streams=8, speculation=speculation, title="warming up")
    profile = await _with_services(address, engines, prompts, arguments)
    return await _with_drafting(fleet, profile, prompts, arguments)


async def _with_services(address: str, engines: Profile, prompts: Prompts, arguments: argparse.Namespace) -> Profile:
    """Adds to a step what it takes longer in the fleet: so much in all, and so much a session."""
    extras, noises, doors = [], [], []
    for streams in PLAIN_STREAMS:
        outcome, door_s = await closed_loop(
            address,
            requests(prompts, streams),
            max_tokens=arguments.max_tokens,
            streams=streams,
            speculation=False,
            title=f"plain, {streams} streams",
        )
        gaps = plain_gaps(outcome)
        extras.append(float(np.median(gaps)) - engines.target.seconds(streams, num_sessions=streams))
        noises.append(_spread(gaps))
        doors.append(door_s)
    session_s, step_s = np.polyfit(PLAIN_STREAMS, extras, 1)
    target = engines.target
    cost = StepCost(
        rows=target.cost.rows, seconds=tuple(max(1e-4, seconds + max(0.0, step_s)) for seconds in target.cost.seconds)
    )
    slower = replace(target, cost=cost, session_s=max(0.0, target.session_s + session_s), noise=fmean(noises))
    return replace(engines, target=slower, door_s=max(0.0, doors[0]))


def plain_gaps(outcome: Outcome) -> list[float]:
    """Times between the pieces of plain streams, a step each."""
    return [
        later - sooner
        for each in outcome.requests
        for (sooner, _), (later, _) in zip(each.pieces, each.pieces[1:], strict=False)
    ]


def _spread(gaps: Sequence[float]) -> float:
    """Standard deviation of the logarithm, as the middle half of the steps has it: stalls are no noise."""
    low, high = np.percentile(np.log(gaps), (25, 75))
    return round(float(high - low) / 1.349, 4)


async def _with_drafting(
    fleet: LocalFleet, profile: Profile, prompts: Prompts, arguments: argparse.Namespace
) -> Profile:
    """Adds the way to the drafter and back, and by how much its work slows the verifier down."""
    address, metrics = fleet.endpoint("gateway").second_address, fleet.endpoint("verifier").second_address
    draft_metrics = fleet.endpoint("drafter").second_address
    round_trip, draft_step = MeanOf("paceline:draft_round_trip_seconds"), MeanOf("paceline:step_seconds")
    rates: dict[int, float] = {}
    for streams in CALIBRATION_STREAMS:
        before, draft_before = await scrape(metrics), await scrape(draft_metrics)
        outcome, _ = await closed_loop(
            address,
            requests(prompts, streams),
            max_tokens=arguments.max_tokens,
            streams=streams,
            speculation=True,
            title=f"calibrating, {streams} streams",
        )
        round_trip.add(before, await scrape(metrics))
        draft_step.add(draft_before, await scrape(draft_metrics))
        rates[streams] = outcome.tokens_per_s
    link_s = max(LEAST_LINK_S, (round_trip.value - draft_step.value) / 2)
    return calibrated(replace(profile, link_s=link_s), rates, prompts, arguments)


def calibrated(profile: Profile, rates: dict[int, float], prompts: Prompts, arguments: argparse.Namespace) -> Profile:
    """The overhead at which the simulator is as fast as the fleet on average, by bisection."""

    def excess(overhead: float) -> float:
        tried = replace(profile, drafting_overhead=overhead)
        ratios = [
            simulated(tried, requests(prompts, streams), arguments.max_tokens, streams).tokens_per_s / rate
            for streams, rate in rates.items()
        ]
        return fmean(ratios) - 1.0

    low, high = 0.0, MOST_OVERHEAD
    if excess(low) <= 0.0:
        return replace(profile, drafting_overhead=low)
    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0.0 else (low, middle)
    return replace(profile, drafting_overhead=round(high, 4))


def requests(prompts: Prompts, streams: int) -> Prompts:
    """The prompts over and over, so many a stream."""
    count = max(8, REQUESTS_PER_STREAM * streams)
    return [prompts[index % len(prompts)] for index in range(count)]


def simulated(profile: Profile, asked: Prompts, max_tokens: int, streams: int, *, way: Way = Way.TIER) -> Outcome:
    """The same requests, simulated; their prompts are cached but for one token."""
    fleet = Fleet(way=way, num_drafters=1 if way is Way.TIER else 0)
    return simulated_loop(profile, fleet, [(1, max_tokens)] * len(asked), streams=streams)
