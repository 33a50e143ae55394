"""The real fleet at a GPU's pace: simulated devices at 1 to 256 streams: `make bench NAME=scale`.

Gateway, verifier, drafter and Valkey are the processes that serve; only the devices are simulated: a step takes the
time that the profile says, and nothing is computed. So what is measured is whether our own code keeps up with such
devices. Four ways:

* plain, tier: by turns on one fleet, speculation off and on
* inside: the drafter is inside the verifier, and takes turns with the target on its devices
* alone: verifier and drafter as for tier, without a gateway and with a client that costs little (gRPC, tokens of up to
  a second in a message); at 64 streams and more, where the others share this machine's cores with gateway and client

In the table, all of it after the load has found its pace:

* ideal: what `paceline plan`'s simulation gives for the same profile and load, where code costs nothing: the same
  engines on a clock that jumps; share: of it
* batch: sessions in a step; length: tokens that a session commits in a step
* cpu_ms: CPU time of each process for a step of the verifier; cpu_us: for a session of such a step; client: this one
* gap_ms: between tokens, those that came at once sharing their wait; ideal: the planner's, at the verifier
* empty: share of a session's steps without a guess to verify, as drafts came too late or the controller wanted none
* late: share of all guesses that came when other tokens were committed
* cores: how many of this machine's all processes together kept busy; busiest: the process that took most, and how many.
  Near 1 that process is the limit. Below it a verifier is slower than its device as it works in turn with it: a step is
  longer by what planning and committing take

With `--stretch K` all devices take K times as long, so that the processes hardly contend for this machine's cores: the
rest of the share is then lost to our own code in the way of a step, and not to the machine. Figures are those of the
stretched devices, and so is the ideal.

Figures of one machine: client, gateway and services share its cores, as they would not in a cluster. The bench is met
when all ways give the same texts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from loadtest.bench import Table, bench_parser, report, run
from loadtest.fleet import bench_fleet
from loadtest.paced import OFF, ask_of, keep_busy, within
from loadtest.straight import StraightDoor
from loadtest.streams import Ask, Completion, Door, HttpDoor
from paceline.cluster.local import LocalFleet
from paceline.planning.report import LOADS, PROMPT_TOKENS, SETTLING, steady
from paceline.planning.simulation import Outcome, Way
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.model import find_profile
from paceline.simulated.profile import DeviceFacts, Profile, write_profile
from tools.procfs import cpu_s
from tools.scrape import mean_between, scrape

FactsT = TypeVar("FactsT", bound=DeviceFacts)

PROFILES = ("70b+1b@4xh100+h100", "8b+0.5b@h100+h100")
LEAST_ALONE = 64
STEPS, SESSIONS, NODES = "paceline:step_seconds", "paceline:gamma", "paceline:draft_nodes_total"
FATES = ("accepted", "rejected", "unverified", "late")
SERVICES = ("verifier", "drafter", "gateway")
PROCESSES = (*SERVICES, "valkey", "client")


# Hashed by what it is, since it stands in names of loads.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """A way to be served.

    Attributes:
        name: In the table.
        planned: The planner's name for it.
        fleet: The name of its fleet.
        speculation: Speculation of its requests; None: the gateway's defaults.
        least_streams: Fewer are not measured.
    """

    name: str
    planned: Way
    fleet: str
    speculation: Mapping[str, Any] | None = None
    least_streams: int = 1


PLAIN = Served(name="plain", planned=Way.PLAIN, fleet="tier", speculation=OFF)
TIER = Served(name="tier", planned=Way.TIER, fleet="tier")
INSIDE = Served(name="inside", planned=Way.COLOCATED, fleet="inside")
ALONE = Served(name="alone", planned=Way.TIER, fleet="alone", least_streams=LEAST_ALONE)
WAYS = (PLAIN, TIER, INSIDE, ALONE)
Cell = tuple[str, int, Served]
IN_VERIFIER = json.dumps({"method": "draft_model", "placement": "verifier"})
FLEETS: Mapping[str, Mapping[str, Any]] = {
    "tier": {},
    "inside": {"speculative_config": IN_VERIFIER},
    "alone": {"verifier_arg": ("--stream-interval-s=1",)},
}


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("scale", __doc__)
    names = [way.name for way in WAYS]
    parser.add_argument("--profiles", nargs="+", default=PROFILES, help="as of paceline up --simulate")
    parser.add_argument("--streams", nargs="+", type=int, default=LOADS, help="loads (default 1 to 256)")
    parser.add_argument("--ways", nargs="+", choices=names, default=names, help="(default: all)")
    add_load_flags(parser, stretch=1.0)
    run(parser, measure)


def add_load_flags(parser: argparse.ArgumentParser, *, stretch: float) -> None:
    """Adds the flags of a load at simulated devices."""
    parser.add_argument("--max-tokens", type=int, default=96, help="mean tokens of a text (default 96)")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a load, until no text begins (default 2.5)")
    parser.add_argument("--rounds", type=int, default=2, help="of each way at each load (default 2)")
    parser.add_argument("--acceptance", type=float, help="chance that a first guess is right (default: the profile's)")
    parser.add_argument(
        "--stretch", type=float, default=stretch, help=f"all devices' times are multiplied by it (default {stretch:g})"
    )


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all profiles; True when texts did not depend on the way."""
    cells = [
        (name, streams, way)
        for name in arguments.profiles
        for streams in arguments.streams
        for way in WAYS
        if way.name in arguments.ways and streams >= way.least_streams
    ]
    ideals = planned_all(cells, arguments)
    table, rows = Table(), list[dict[str, Any]]()
    with tqdm(total=len(cells) * arguments.rounds, desc="measuring", unit="load") as bar:
        bench = Bench(arguments, bar)
        for name in arguments.profiles:
            await bench.measure_profile([cell for cell in cells if cell[0] == name])
        for cell in cells:
            name, streams, way = cell
            first = {"profile": name, "streams": streams, "way": way.name}
            rows.append(first | averaged(bench.rounds[cell], ideals[cell]))
            table.add(rows[-1])
    return report("scale", simulated=True, rows=rows, ok=bench.same_texts)


def planned_all(cells: Sequence[Cell], arguments: argparse.Namespace) -> dict[Cell, Outcome]:
    """The planner's prediction of each; before anything is measured, since it takes all cores."""
    with ProcessPoolExecutor() as pool:
        outcomes = [
            pool.submit(steady, costless(name, arguments), way.planned, streams, mean_tokens=arguments.max_tokens)
            for name, streams, way in cells
        ]
        return {
            cell: outcome.result()
            for cell, outcome in tqdm(zip(cells, outcomes, strict=True), "planning", len(cells), unit="load")
        }


def stretched(name: str, factor: float) -> Profile:
    """A profile whose devices and links take `factor` times as long: our own code weighs less beside them."""
    profile = find_profile(name)

    def slower(facts: FactsT) -> FactsT:
        times = {name: factor * getattr(facts, name) for name in ("session_s", "kv_token_s")}
        return replace(facts, seconds=tuple(factor * each for each in facts.seconds), **times)

    return replace(
        profile,
        link_s=factor * profile.link_s,
        door_s=factor * profile.door_s,
        target=slower(profile.target),
        drafter=slower(profile.drafter),
        colocated=slower(profile.colocated),
    )


def costless(name: str, arguments: argparse.Namespace) -> Profile:
    """A profile without our own code, which is a share of a step there, and takes its time in the fleet."""
    profile, acceptance = stretched(name, arguments.stretch), arguments.acceptance
    law = profile.acceptance if acceptance is None else GuessLaw.at(acceptance)
    return replace(profile, acceptance=law, drafting_overhead=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Work of a fleet up to a moment: CPU seconds by process, and the metrics of its verifier."""

    cpu_s: Mapping[str, float]
    metrics: Mapping[str, float]

    def since(self, before: Spent, metric: str) -> float:
        """Growth of a metric."""
        return self.metrics.get(metric, 0.0) - before.metrics.get(metric, 0.0)


class Bench:
    """Measures loads, and keeps what came.

    Args:
        arguments: Arguments of the command line.
        bar: Progress bar.

    Attributes:
        rounds: Figures of each round, by what was measured.
    """

    def __init__(self, arguments: argparse.Namespace, bar: tqdm[Any]) -> None:
        self.rounds: defaultdict[Cell, list[dict[str, Any]]] = defaultdict(list)
        self._arguments, self._bar = arguments, bar
        # A stretched device does as much in as many times the seconds.
        self._seconds = arguments.seconds * arguments.stretch
        self._texts: defaultdict[tuple[str, int], set[str]] = defaultdict(set)

    @property
    def same_texts(self) -> bool:
        """Whether each request had one text, whichever way and however many others there were."""
        return all(len(texts) == 1 for texts in self._texts.values())

    async def measure_profile(self, cells: Sequence[Cell]) -> None:
        """Measures loads of one profile, those of one fleet by turns."""
        for fleet_name, settings in FLEETS.items():
            mine = [cell for cell in cells if cell[2].fleet == fleet_name]
            if not mine:
                continue
            profile, _, way = mine[0]
            with tempfile.TemporaryDirectory() as folder:
                simulated = Path(folder) / "profile.json"
                write_profile(stretched(profile, self._arguments.stretch), simulated)
                await self._measure_fleet(mine, way, simulate=str(simulated), **settings)

    async def _measure_fleet(self, mine: Sequence[Cell], way: Served, **settings: Any) -> None:
        async with bench_fleet(acceptance=self._arguments.acceptance, **settings) as fleet:
            await self._run(fleet, way, streams=8, seconds=self._arguments.stretch)
            for streams in dict.fromkeys(cell[1] for cell in mine):
                now = [cell for cell in mine if cell[1] == streams]
                for number in range(self._arguments.rounds):
                    for cell in now if number % 2 == 0 else now[::-1]:
                        await self._measure(fleet, cell)

    async def _measure(self, fleet: LocalFleet, cell: Cell) -> None:
        profile, streams, way = cell
        self._bar.set_postfix_str(f"{profile}, {streams} {way.name}")
        seconds = self._seconds
        running = asyncio.create_task(self._run(fleet, way, streams, seconds))
        since_s = time.perf_counter()
        await asyncio.sleep(SETTLING * seconds)
        before, before_s = await spent(fleet), time.perf_counter() - since_s
        await asyncio.sleep(max(0.0, seconds - before_s))
        after, after_s = await spent(fleet), time.perf_counter() - since_s
        completions = await running
        for number, each in enumerate(completions):
            self._texts[way.fleet if way is ALONE else "", number].add(each.text)
        self.rounds[cell].append(figures(completions, before, after, before_s, after_s))
        self._bar.update()

    async def _run(self, fleet: LocalFleet, way: Served, streams: int, seconds: float) -> list[Completion]:
        def make(number: int) -> Ask:
            ask = ask_of(number, self._arguments.max_tokens, way.speculation)
            return replace(ask, prompt=prompt_ids(number)) if way is ALONE else ask

        door: Door = StraightDoor(fleet.endpoint("verifier").address) if way is ALONE else HttpDoor(fleet.gateway_url)
        try:
            return await keep_busy(door, make, streams, seconds)
        finally:
            await door.close()


def prompt_ids(number: int) -> Sequence[int]:
    """A prompt of its own for each request."""
    return [1 + (number >> shift) % 64 for shift in range(PROMPT_TOKENS)]


async def spent(fleet: LocalFleet) -> Spent:
    """Work of a fleet, and this process, until now."""
    roles = dict.fromkeys(endpoint.role for endpoint in fleet.endpoints)
    pids = {**{role: fleet.pid(role) for role in roles}, "client": os.getpid()}
    metrics = await scrape(fleet.endpoint("verifier").second_address)
    return Spent(cpu_s={name: cpu_s(pid) for name, pid in pids.items()}, metrics=metrics)


def figures(
    completions: Sequence[Completion], before: Spent, after: Spent, since_s: float, until_s: float
) -> dict[str, Any]:
    """Figures of a round, between two moments of it."""
    parts = [within(each, since_s, until_s) for each in completions]
    gaps = [1e3 * gap for part in parts for gap in part.token_gaps_s] or [0.0]
    num_steps, num_sessions = (max(1.0, after.since(before, f"{name}_count")) for name in (STEPS, SESSIONS))
    num_nodes = sum(after.since(before, f"{NODES}{{{fate}}}") for fate in FATES)
    cpu_s = {name: after.cpu_s.get(name, 0.0) - before.cpu_s.get(name, 0.0) for name in PROCESSES}
    num_tokens = sum(count for part in parts for _, count in part.counts)
    return {
        "tokens_per_s": num_tokens / (until_s - since_s),
        "batch": num_sessions / num_steps,
        "length": num_tokens / num_sessions,
        "step_ms": 1e3 * mean_between(STEPS, [(before.metrics, after.metrics)]),
        "cpu_ms": {name: 1e3 * seconds / num_steps for name, seconds in cpu_s.items()},
        "cpu_us": {name: 1e6 * cpu_s[name] / num_sessions for name in SERVICES},
        "gap_ms": {"p50": float(np.percentile(gaps, 50)), "p99": float(np.percentile(gaps, 99))},
        "empty": after.since(before, f"{SESSIONS}_bucket{{0.0}}") / num_sessions,
        "late": after.since(before, f"{NODES}{{late}}") / max(1.0, num_nodes),
        "cores": {name: seconds / (until_s - since_s) for name, seconds in cpu_s.items()},
    }


def averaged(rounds: Sequence[Mapping[str, Any]], ideal: Outcome) -> dict[str, Any]:
    """Means over rounds, beside what the planner says."""
    speeds = [each["tokens_per_s"] for each in rounds]
    mean = _mean(rounds)
    cores = mean.pop("cores")
    p50_s, _, p99_s = ideal.itl_s()
    mean["gap_ms"] |= {"ideal_p50": 1e3 * p50_s, "ideal_p99": 1e3 * p99_s}
    own = {
        "tokens_per_s": mean.pop("tokens_per_s"),
        "spread": (max(speeds) - min(speeds)) / statistics.fmean(speeds),
        "ideal": ideal.tokens_per_s,
        "share": statistics.fmean(speeds) / ideal.tokens_per_s,
    }
    busiest = max(cores, key=cores.__getitem__)
    return {**rounded(own | mean | {"cores": sum(cores.values())}), "busiest": f"{busiest} {cores[busiest]:.2f}"}


def _mean(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of figures, also of those in objects."""
    return {
        name: _mean([each[name] for each in rounds])
        if isinstance(value, Mapping)
        else statistics.fmean(each[name] for each in rounds)
        for name, value in rounds[0].items()
    }


def rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a table, with three digits behind the point, or one where they are large."""
    return {
        name: rounded(value) if isinstance(value, Mapping) else round(value, 1 if abs(value) >= 100 else 3)
        for name, value in figures.items()
    }


if __name__ == "__main__":
    main()
