"""The real fleet at a GPU's pace: simulated devices beside what the planner says: `make bench NAME=scale`.

Gateway, verifiers, drafter and Valkey are the processes that serve; only the devices are simulated: a step takes the
time that the profile says, and nothing is computed. So what is measured is whether our own code keeps up with such
devices. Ways:

* plain, tier: by turns on one fleet, speculation off and on; all verifiers share one drafter
* inside: the drafter is inside the verifier, and takes turns with the target on its devices
* replica: a verifier more for as many streams, all plain; measured as fewer streams on each verifier of the first fleet

One verifier is reached through the gateway. With `--verifiers 1 2 4` the client goes straight to each verifier, so that
each has as many streams as the others, and no gateway is measured. In the table, all of it after the load has found its
pace:

* ideal: what `paceline plan`'s simulation gives for the same profiles and load, where code costs nothing: the same
  engines on a clock that jumps; share: of it; own_cores: the share that verifier and drafter would reach with a core
  each, where the CPU time of their engines' code goes into the simulation
* verifier, least: tokens/s of a verifier, the mean of all and the least
* kept: of what a verifier has with a drafter of its own, which is the row of one verifier
* gpu: tokens per GPU-second of the whole fleet, the drafter's GPU counted; ideal_gpu: the planner's
* drafting: share of time in which the drafter's device works; draft_ms: its time for a token that is committed
* batch: sessions in a step; length: tokens that a session commits in a step
* cpu_ms: CPU time of each tier for a step of a verifier; cpu_us: for a session of such a step; client: this process
* gap_ms: between tokens, those that came at once sharing their wait; ideal: the planner's, at the verifier
* empty: share of a session's steps without a guess to verify, as drafts came too late or the controller wanted none
* late: share of all guesses that came when other tokens were committed
* cores: how many of this machine's all processes together kept busy; busiest: the tier that took most, and how many.
  Near 1 that process is the limit. Below it a verifier is slower than its device as it works in turn with it: a step is
  longer by what planning and committing take

With `--stretch K` all devices take K times as long, so that the processes hardly contend for this machine's cores: the
rest of the share is then lost to our own code in the way of a step, and not to the machine. Figures are those of the
stretched devices, and so is the ideal. With --second-profile every other verifier has another target, at the drafter of
the first profile: `each` has tokens/s by verifier, and `kept` is left out. With --busy N the first of several verifiers
has N streams; verifier, least and kept are those of the others.

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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from loadtest.alternating import environ_of
from loadtest.bench import Table, bench_parser, report, run
from loadtest.fleet import bench_fleet
from loadtest.host_time import ChargedDevice
from loadtest.paced import OFF, ask_of, keep_busy, within
from loadtest.straight import StraightDoor
from loadtest.streams import Ask, Completion, Door, HttpDoor
from loadtest.trial import take_turns
from paceline.cluster.local import LocalFleet
from paceline.planning.engines import DeviceAtWork
from paceline.planning.report import LEAST_S, LOADS, PROMPT_TOKENS, SECONDS, SETTLING, lengths
from paceline.planning.simulation import Outcome, Way, run_closed
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.model import find_profile
from paceline.simulated.profile import DeviceFacts, Profile, write_profile
from tools.procfs import cpu_s
from tools.scrape import scrape

FactsT = TypeVar("FactsT", bound=DeviceFacts)

PLAIN, TIER, INSIDE, REPLICA = "plain", "tier", "inside", "replica"
PLANNED = {PLAIN: Way.PLAIN, TIER: Way.TIER, INSIDE: Way.COLOCATED, REPLICA: Way.PLAIN}
# Settings of fleets, by the ways that they serve.
FLEETS: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    (PLAIN, TIER, REPLICA): {},
    (INSIDE,): {"speculative_config": json.dumps({"method": "draft_model", "placement": "verifier"})},
}
STEPS, SESSIONS, NODES = "paceline:step_seconds", "paceline:gamma", "paceline:draft_nodes_total"
FATES, DRAFTED = ("accepted", "rejected", "unverified", "late"), "paceline:draft_seconds_total"
SERVICES = ("verifier", "drafter", "gateway")
TIERS = (*SERVICES, "valkey", "client")
DEVICES = (DeviceAtWork, ChargedDevice)
# Seconds at the devices' own pace in which verifiers learn; in 31 steps of a load none drafted.
LEARNING_S = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Verifiers, the streams of each, and how they are served; `busy`: streams of the first one, 0: as many."""

    profile: str
    verifiers: int
    streams: int
    way: str
    busy: int = 0

    @property
    def each(self) -> list[int]:
        """Streams of each verifier that runs here."""
        asked = [self.busy or self.streams] + [self.streams] * (self.verifiers - 1)
        if self.way != REPLICA:
            return asked
        return [max(1, round(streams * self.verifiers / (self.verifiers + 1))) for streams in asked]

    def num_gpus(self, profiles: Sequence[Profile]) -> int:
        """GPUs of the verifiers that run here, and of their drafter, the first one's."""
        drafters = profiles[0].drafter.num_devices if self.way == TIER else 0
        return drafters + sum(each.target.num_devices for each in profiles)

    def profiles(self, arguments: argparse.Namespace) -> list[Profile]:
        """Devices of each verifier."""
        names = (self.profile, arguments.second_profile or self.profile)
        return [costless(names[number % 2], arguments) for number in range(self.verifiers)]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("scale", __doc__)
    profiles = ("70b+1b@4xh100+h100", "8b+0.5b@h100+h100")
    parser.add_argument("--profiles", nargs="+", default=profiles, help="as of paceline up --simulate")
    parser.add_argument("--second-profile", default="", help="of every other verifier (default: the same)")
    parser.add_argument("--verifiers", nargs="+", type=int, default=[1], help="at one drafter (default 1)")
    parser.add_argument("--streams", nargs="+", type=int, default=LOADS, help="of each verifier (default 1 to 256)")
    parser.add_argument("--busy", type=int, default=0, help="streams of the first of several (default: as many)")
    parser.add_argument("--ways", nargs="+", choices=PLANNED, default=[PLAIN, TIER, INSIDE], help="(default: 3)")
    parser.add_argument("--max-tokens", type=int, default=96, help="mean tokens of a text (default 96)")
    parser.add_argument("--seconds", type=float, default=2.5, help="of a load, until no text begins (default 2.5)")
    parser.add_argument("--rounds", type=int, default=2, help="of each way at each load (default 2)")
    parser.add_argument("--acceptance", type=float, help="chance that a first guess is right (default: the profile's)")
    parser.add_argument("--stretch", type=float, default=1.0, help="all devices' times are multiplied by it")
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all loads; True when texts did not depend on the way."""
    loads = [
        Load(profile=name, verifiers=count, streams=streams, way=way, busy=arguments.busy if count > 1 else 0)
        for name in arguments.profiles
        for count in arguments.verifiers
        for streams in arguments.streams
        for way in PLANNED
        if way in arguments.ways
    ]
    # Before anything is measured, since it takes all cores; in other processes, since it has an event loop.
    with ProcessPoolExecutor() as pool:
        futures = [pool.submit(planned, load, arguments, device) for device in DEVICES for load in loads]
        outcomes = iter([future.result() for future in tqdm(futures, "planning", unit="load")])
    ideals, hosted = ({load: next(outcomes) for load in loads} for _ in DEVICES)
    bench, rounds = Bench(arguments), dict[Load, list[dict[str, Any]]]()
    for name in arguments.profiles:
        for count in arguments.verifiers:
            rounds |= await bench.measure([each for each in loads if (each.profile, each.verifiers) == (name, count)])
    table, rows = Table(), list[dict[str, Any]]()
    for load in loads:
        own = rounds.get(replace(load, verifiers=1, busy=0))
        gpus = load.num_gpus(load.profiles(arguments))
        rows.append(row_of(load, gpus, rounds[load], own, ideals[load], hosted[load]))
        if arguments.second_profile:
            rows[-1] |= {"kept": None, "each": [round(each, 1) for each in _mean(rounds[load])["each"]]}
        table.add(rows[-1])
    return report("scale", simulated=True, rows=rows, ok=bench.same_texts)


def planned(load: Load, arguments: argparse.Namespace, device: type[DeviceAtWork] = DeviceAtWork) -> list[Outcome]:
    """The planner's prediction of each verifier, on such devices."""
    until_s = arguments.stretch * max(LEAST_S, SECONDS / (load.verifiers * load.streams))
    return run_closed(
        load.profiles(arguments),
        PLANNED[load.way],
        lengths(arguments.max_tokens),
        streams=load.each,
        until_s=until_s,
        warm_up_s=SETTLING * until_s,
        device=device,
    )


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
    """Work of a fleet up to a moment: CPU seconds by tier, and the sums of metrics of verifiers and drafters."""

    at_s: float
    cpu_s: Mapping[str, float]
    verifiers: Mapping[str, float]
    drafting_s: float

    def since(self, before: Spent, metric: str) -> float:
        """Growth of a metric of the verifiers."""
        return self.verifiers.get(metric, 0.0) - before.verifiers.get(metric, 0.0)


class Bench:
    """Measures loads, and keeps their texts.

    Args:
        arguments: Arguments of the command line.
    """

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._straight = arguments.verifiers != [1]
        # By target and number.
        self._texts: defaultdict[tuple[int, int], set[str]] = defaultdict(set)

    @property
    def same_texts(self) -> bool:
        """Whether each request had one text, whichever way and however many others there were."""
        return all(len(texts) == 1 for texts in self._texts.values())

    async def measure(self, loads: Sequence[Load]) -> dict[Load, list[dict[str, Any]]]:
        """Figures of loads of the same devices, one a round; those of one fleet are measured by turns."""
        rounds: dict[Load, list[dict[str, Any]]] = {}
        for ways, settings in FLEETS.items():
            mine = [load for load in loads if load.way in ways]
            if mine:
                with tempfile.TemporaryDirectory() as folder:
                    rounds |= await self._measure_fleet(mine, **settings, **self._devices(mine[0], Path(folder)))
        return rounds

    def _devices(self, load: Load, folder: Path) -> dict[str, Any]:
        first, second = (folder / name for name in ("first.json", "second.json"))
        named = load.profile, self._arguments.second_profile or load.profile
        for path, name in zip((first, second), named, strict=True):
            write_profile(stretched(name, self._arguments.stretch), path)
        launcher = {"modules": {"verifier": "loadtest.alternating"}}
        return {"simulate": str(first), "launcher": launcher, "environ": environ_of({"--profile": second})}

    async def _measure_fleet(self, loads: Sequence[Load], **settings: Any) -> dict[Load, list[dict[str, Any]]]:
        rounds, count = dict[Load, list[dict[str, Any]]](), loads[0].verifiers
        async with bench_fleet(acceptance=self._arguments.acceptance, num_verifiers=count, **settings) as fleet:
            for streams in dict.fromkeys(load.streams for load in loads):
                now = [load for load in loads if load.streams == streams]
                # Verifiers learn what drafting is worth at this load, which takes them some hundred steps.
                learning = replace(now[-1], way=TIER if now[-1].way == REPLICA else now[-1].way)
                await self._run(fleet, learning, LEARNING_S * self._arguments.stretch)
                rounds |= await take_turns(
                    now,
                    lambda load: self._measure(fleet, load),
                    rounds=self._arguments.rounds,
                    title=f"{count} x {streams} streams",
                )
        return rounds

    async def _measure(self, fleet: LocalFleet, load: Load) -> dict[str, Any]:
        # A stretched device does as much in as many times the seconds.
        seconds, since_s = self._arguments.seconds * self._arguments.stretch, time.perf_counter()
        running = asyncio.create_task(self._run(fleet, load, seconds))
        await asyncio.sleep(SETTLING * seconds)
        before = await spent(fleet)
        await asyncio.sleep(max(0.0, since_s + seconds - before.at_s))
        after = await spent(fleet)
        done = await running
        return figures(done, before, after, (before.at_s - since_s, after.at_s - since_s))

    async def _run(self, fleet: LocalFleet, load: Load, seconds: float) -> list[list[Completion]]:
        """Completions of each verifier's streams."""
        speculation, mean_tokens = OFF if PLANNED[load.way] is Way.PLAIN else None, self._arguments.max_tokens

        def make(number: int) -> Ask:
            ask = ask_of(number, mean_tokens, speculation)
            return replace(ask, prompt=prompt_ids(number)) if self._straight else ask

        doors: list[Door] = [HttpDoor(fleet.gateway_url)]
        if self._straight:
            doors = [StraightDoor(each.address) for each in fleet.endpoints_of("verifier")]
        try:
            pairs = zip(doors, load.each, strict=True)
            done = await asyncio.gather(*(keep_busy(door, make, streams, seconds) for door, streams in pairs))
        finally:
            await asyncio.gather(*(door.close() for door in doors))
        for place, completions in enumerate(done):
            target = place % 2 if self._arguments.second_profile else 0
            for number, each in enumerate(completions):
                self._texts[target, number].add(each.text)
        return done


def prompt_ids(number: int) -> Sequence[int]:
    """A prompt of its own for each request."""
    return [1 + (number >> shift) % 64 for shift in range(PROMPT_TOKENS)]


async def spent(fleet: LocalFleet) -> Spent:
    """Work of a fleet, and this process, until now."""
    taken_s = defaultdict(float, client=cpu_s(os.getpid()))
    for endpoint in fleet.endpoints:
        taken_s[endpoint.role] += cpu_s(fleet.pid(endpoint.name))
    verifiers = await asyncio.gather(*(scrape(each.second_address) for each in fleet.endpoints_of("verifier")))
    drafters = await asyncio.gather(*(scrape(each.second_address) for each in fleet.endpoints_of("drafter")))
    sums = {name: sum(page.get(name, 0.0) for page in verifiers) for page in verifiers for name in page}
    drafting_s = sum(page.get(DRAFTED, 0.0) for page in (*verifiers, *drafters))
    return Spent(at_s=time.perf_counter(), cpu_s=taken_s, verifiers=sums, drafting_s=drafting_s)


def figures(
    done: Sequence[Sequence[Completion]], before: Spent, after: Spent, times_s: tuple[float, float]
) -> dict[str, Any]:
    """Figures of a round, between two moments of it."""
    span_s = after.at_s - before.at_s
    parts = [[within(each, *times_s) for each in completions] for completions in done]
    gaps = [1e3 * gap for each in parts for part in each for gap in part.token_gaps_s] or [0.0]
    num_steps, num_sessions = (max(1.0, after.since(before, f"{name}_count")) for name in (STEPS, SESSIONS))
    num_nodes = sum(after.since(before, f"{NODES}{{{fate}}}") for fate in FATES)
    cpu_s = {name: after.cpu_s.get(name, 0.0) - before.cpu_s.get(name, 0.0) for name in TIERS}
    num_tokens = [sum(count for part in each for _, count in part.counts) for each in parts]
    return {
        "each": [count / span_s for count in num_tokens],
        "drafting": (after.drafting_s - before.drafting_s) / span_s,
        "batch": num_sessions / num_steps,
        "length": sum(num_tokens) / num_sessions,
        "step_ms": 1e3 * after.since(before, f"{STEPS}_sum") / num_steps,
        "cpu_ms": {name: 1e3 * seconds / num_steps for name, seconds in cpu_s.items()},
        "cpu_us": {name: 1e6 * cpu_s[name] / num_sessions for name in SERVICES},
        "gap_ms": {"p50": float(np.percentile(gaps, 50)), "p99": float(np.percentile(gaps, 99))},
        "empty": after.since(before, f"{SESSIONS}_bucket{{0.0}}") / num_sessions,
        "late": after.since(before, f"{NODES}{{late}}") / max(1.0, num_nodes),
        "cores": {name: seconds / span_s for name, seconds in cpu_s.items()},
    }


def row_of(
    load: Load,
    num_gpus: int,
    rounds: Sequence[Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]] | None,
    ideals: Sequence[Outcome],
    hosted: Sequence[Outcome],
) -> dict[str, Any]:
    """A row of the table: means over rounds, beside what the planner says.

    Args:
        hosted: The planner's outcomes where code takes its time.
        own: Rounds of one verifier of the same way and load; None: they were not measured.
    """
    mean, rates = _mean(rounds), [sum(each["each"]) for each in rounds]
    compared = mean.pop("each")[1 if load.busy else 0 :]
    rate, ideal, drafting = statistics.fmean(rates), sum(each.tokens_per_s for each in ideals), mean.pop("drafting")
    cores, alone = mean.pop("cores"), sum(_mean(own)["each"]) if own else None
    p50s, _, p99s = zip(*(each.itl_s() for each in ideals), strict=True)
    mean["gap_ms"] |= {"ideal_p50": 1e3 * statistics.fmean(p50s), "ideal_p99": 1e3 * statistics.fmean(p99s)}
    of_fleet = {
        "tokens_per_s": rate,
        "spread": (max(rates) - min(rates)) / rate,
        "ideal": ideal,
        "share": rate / ideal,
        "own_cores": sum(each.tokens_per_s for each in hosted) / ideal,
        "verifier": statistics.fmean(compared),
        "least": min(compared),
        "gpu": rate / num_gpus,
        "ideal_gpu": ideal / num_gpus,
        "drafting": drafting / (load.verifiers if load.way == INSIDE else 1),
        "draft_ms": 1e3 * drafting / rate,
    }
    busiest, shown = max(cores, key=cores.__getitem__), asdict(load)
    del shown["busy"]
    return {
        **shown,
        "kept": None if alone is None else round(statistics.fmean(compared) / alone, 3),
        **_rounded(of_fleet | mean | {"cores": sum(cores.values())}),
        "busiest": f"{busiest} {cores[busiest]:.2f}",
    }


def _mean(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means of figures, also of those in objects and lists."""

    def mean_of(values: Sequence[Any]) -> Any:
        if isinstance(values[0], Mapping):
            return _mean(values)
        if isinstance(values[0], list):
            return [statistics.fmean(each) for each in zip(*values, strict=True)]
        return statistics.fmean(values)

    return {name: mean_of([each[name] for each in rounds]) for name in rounds[0]}


def _rounded(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a table, with three digits behind the point, or one where they are large."""
    return {
        name: _rounded(value) if isinstance(value, Mapping) else round(value, 1 if abs(value) >= 100 else 3)
        for name, value in figures.items()
    }


if __name__ == "__main__":
    main()
