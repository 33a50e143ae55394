"""One drafter for several verifiers, by the real services on simulated devices: `make bench NAME=shared`.

Verifiers and drafters are the processes that serve; only their devices are simulated. The client goes straight to each
verifier, so that each has as many streams as the others, and no gateway is measured. Ways:

* plain, tier: by turns on one fleet, speculation off and on; all verifiers share one drafter
* inside: each verifier has the drafter inside, on its own devices
* replica: a verifier more for as many streams, all plain; measured as fewer streams on each verifier of the first fleet

In the table, all of it after the load has found its pace:

* verifier, least: tokens/s of a verifier, the mean of all and the least
* share: of what a verifier has with a drafter of its own, which is the row of one verifier
* gpu: tokens per GPU-second of the whole fleet, the drafter's GPU counted; ideal: what `paceline plan`'s simulation
  gives for the same fleet, where code costs nothing; error: the measured one over it, less 1
* busy: share of time in which the drafter's device works
* draft_ms: its time for a token that is committed

With `--stretch K` all devices take K times as long, so that the processes hardly contend for this machine's cores.
Figures are those of the stretched devices, and so is the ideal. With --second-profile every other verifier has another
target, at the drafter of --profile: `each` has tokens/s by verifier, and shares are left out. With --busy N the first
of several verifiers has N streams; verifier, least and share are those of the others. The bench is met when all ways
give the same texts.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.alternating import environ_of
from loadtest.bench import Table, bench_parser, report, run
from loadtest.fleet import bench_fleet
from loadtest.paced import OFF, ask_of, keep_busy
from loadtest.scale import IN_VERIFIER, add_load_flags, costless, prompt_ids, rounded, stretched
from loadtest.straight import StraightDoor
from loadtest.streams import Ask
from paceline.cluster.local import LocalFleet
from paceline.planning.report import SETTLING, lengths
from paceline.planning.simulation import Outcome, Way, run_closed
from paceline.simulated.profile import Profile, write_profile
from tools.scrape import scrape

PLAIN, TIER, INSIDE, REPLICA = "plain", "tier", "inside", "replica"
PLANNED = {PLAIN: Way.PLAIN, TIER: Way.TIER, INSIDE: Way.COLOCATED, REPLICA: Way.PLAIN}
FLEETS: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    (PLAIN, TIER, REPLICA): {},
    (INSIDE,): {"speculative_config": IN_VERIFIER},
}
COMMITTED, DRAFTED = "vllm:generation_tokens_total", "paceline:draft_seconds_total"
# Seconds at the devices' own pace in which verifiers learn; in 31 steps of a load none drafted.
LEARNING_S = 2.5
# Seconds of virtual time that the planner simulates, the first third of which does not count.
PLANNED_S = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Verifiers, the streams of each, and how they are served; `busy`: streams of the first one, 0: as many."""

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
        names = (arguments.profile, arguments.second_profile or arguments.profile)
        return [costless(names[number % 2], arguments) for number in range(self.verifiers)]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("shared", __doc__)
    parser.add_argument("--profile", default="70b+1b@4xh100+h100", help="as of paceline up --simulate")
    parser.add_argument("--second-profile", default="", help="of every other verifier (default: the same)")
    parser.add_argument("--verifiers", nargs="+", type=int, default=(1, 2, 4), help="(default 1 2 4)")
    parser.add_argument("--streams", nargs="+", type=int, default=(8, 32), help="of each verifier (default 8 32)")
    parser.add_argument("--busy", type=int, default=0, help="streams of the first of several (default: as many)")
    parser.add_argument("--ways", nargs="+", choices=PLANNED, default=list(PLANNED), help="(default: all)")
    add_load_flags(parser, stretch=8.0)
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all loads; True when texts did not depend on the way."""
    loads = [
        Load(verifiers=count, streams=streams, way=way, busy=arguments.busy if count > 1 else 0)
        for count in arguments.verifiers
        for streams in arguments.streams
        for way in PLANNED
        if way in arguments.ways
    ]
    # Before anything is measured, since it takes all cores; in other processes, since it has an event loop.
    with ProcessPoolExecutor() as pool:
        futures = [pool.submit(planned, load, arguments) for load in loads]
        bars = tqdm(zip(loads, futures, strict=True), "planning", len(loads), unit="load")
        ideals = {load: future.result() for load, future in bars}
    with tqdm(total=len(loads) * arguments.rounds, desc="measuring", unit="load") as bar:
        bench = Bench(arguments, bar)
        for count in arguments.verifiers:
            await bench.measure_fleets([load for load in loads if load.verifiers == count])
    table, rows = Table(), list[dict[str, Any]]()
    for load in loads:
        own = bench.rounds.get(replace(load, verifiers=1, busy=0))
        rows.append(row_of(load, load.profiles(arguments), bench.rounds[load], own, ideals[load]))
        if arguments.second_profile:
            rows[-1] |= {"share": None, "each": each_of(bench.rounds[load])}
        table.add(rows[-1])
    return report("shared", simulated=True, rows=rows, ok=bench.same_texts)


def planned(load: Load, arguments: argparse.Namespace) -> list[Outcome]:
    """The planner's prediction of each verifier."""
    until_s = PLANNED_S * arguments.stretch
    return run_closed(
        load.profiles(arguments),
        PLANNED[load.way],
        lengths(arguments.max_tokens),
        streams=load.each,
        until_s=until_s,
        warm_up_s=SETTLING * until_s,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Figures of a round: tokens/s of each verifier, and seconds that drafters' devices work in a second."""

    tokens_per_s: Sequence[float]
    drafting: float


class Bench:
    """Measures loads, and keeps what came.

    Args:
        arguments: Arguments of the command line.
        bar: Progress bar.

    Attributes:
        rounds: Figures of each round, by what was measured.
    """

    def __init__(self, arguments: argparse.Namespace, bar: tqdm[Any]) -> None:
        self.rounds: defaultdict[Load, list[Round]] = defaultdict(list)
        self._arguments, self._bar = arguments, bar
        # By target and number.
        self._texts: defaultdict[tuple[int, int], set[str]] = defaultdict(set)

    @property
    def same_texts(self) -> bool:
        """Whether each request had one text, whichever verifier and way."""
        return all(len(texts) == 1 for texts in self._texts.values())

    async def measure_fleets(self, loads: Sequence[Load]) -> None:
        """Measures loads of one number of verifiers, those of one fleet by turns."""
        for ways, settings in FLEETS.items():
            mine = [load for load in loads if load.way in ways]
            if mine:
                with tempfile.TemporaryDirectory() as folder:
                    first, second = (Path(folder) / name for name in ("first.json", "second.json"))
                    named = self._arguments.profile, self._arguments.second_profile or self._arguments.profile
                    for path, name in zip((first, second), named, strict=True):
                        write_profile(stretched(name, self._arguments.stretch), path)
                    others = {"environ": environ_of({"--profile": second})}
                    launcher = {"modules": {"verifier": "loadtest.alternating"}}
                    await self._measure_fleet(mine, simulate=str(first), launcher=launcher, **others, **settings)

    async def _measure_fleet(self, loads: Sequence[Load], **settings: Any) -> None:
        num_verifiers = loads[0].verifiers
        async with bench_fleet(acceptance=self._arguments.acceptance, num_verifiers=num_verifiers, **settings) as fleet:
            for streams in dict.fromkeys(load.streams for load in loads):
                now = [load for load in loads if load.streams == streams]
                # Verifiers learn what drafting is worth at this load, which takes them some hundred steps.
                await self._run(fleet, replace(now[-1], way=TIER), LEARNING_S * self._arguments.stretch)
                for number in range(self._arguments.rounds):
                    for load in now if number % 2 == 0 else now[::-1]:
                        self.rounds[load].append(await self._measure(fleet, load))
                        self._bar.update()

    async def _measure(self, fleet: LocalFleet, load: Load) -> Round:
        self._bar.set_postfix_str(f"{load.verifiers} verifiers, {load.streams} {load.way}")
        # A stretched device does as much in as many times the seconds.
        seconds = self._arguments.seconds * self._arguments.stretch
        running = asyncio.create_task(self._run(fleet, load, seconds))
        loop = asyncio.get_running_loop()
        since_s = loop.time()
        await asyncio.sleep(SETTLING * seconds)
        before, before_s = await counted(fleet), loop.time()
        await asyncio.sleep(max(0.0, since_s + seconds - before_s))
        after, span_s = await counted(fleet), loop.time() - before_s
        await running
        grown = [{name: now[name] - old[name] for name in now} for old, now in zip(before, after, strict=True)]
        return Round(
            tokens_per_s=[each[COMMITTED] / span_s for each in grown[: load.verifiers]],
            drafting=sum(each[DRAFTED] for each in grown) / span_s,
        )

    async def _run(self, fleet: LocalFleet, load: Load, seconds: float) -> None:
        speculation = OFF if PLANNED[load.way] is Way.PLAIN else None

        def make(number: int) -> Ask:
            ask = ask_of(number, self._arguments.max_tokens, speculation)
            return replace(ask, prompt=prompt_ids(number))

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


async def counted(fleet: LocalFleet) -> list[dict[str, float]]:
    """Tokens and drafting time until now of each verifier, then of drafters."""
    endpoints = [*fleet.endpoints_of("verifier"), *fleet.endpoints_of("drafter")]
    pages = await asyncio.gather(*(scrape(each.second_address) for each in endpoints))
    return [{name: page.get(name, 0.0) for name in (COMMITTED, DRAFTED)} for page in pages]


def each_of(rounds: Sequence[Round]) -> list[float]:
    """Tokens/s of each verifier, the mean of all rounds."""
    return [round(statistics.fmean(each), 1) for each in zip(*(one.tokens_per_s for one in rounds), strict=True)]


def row_of(
    load: Load,
    profiles: Sequence[Profile],
    rounds: Sequence[Round],
    own: Sequence[Round] | None,
    ideal: Sequence[Outcome],
) -> dict[str, Any]:
    """A row of the table.

    Args:
        profiles: Devices of each verifier.
        own: Rounds of one verifier of the same way and load; None: they were not measured.
    """
    fleet = [sum(each.tokens_per_s) for each in rounds]
    compared = [each.tokens_per_s[1:] if load.busy else each.tokens_per_s for each in rounds]
    verifier = statistics.fmean(map(statistics.fmean, compared))
    mean, gpus = statistics.fmean(fleet), load.num_gpus(profiles)
    planned_rate = sum(each.tokens_per_s for each in ideal)
    alone = statistics.fmean(sum(each.tokens_per_s) for each in own) if own else None
    drafting = statistics.fmean(each.drafting for each in rounds)
    figures = {
        "verifier": verifier,
        "least": statistics.fmean(map(min, compared)),
        "gpu": mean / gpus,
        "ideal": planned_rate / gpus,
        "error": mean / planned_rate - 1.0,
        "spread": (max(fleet) - min(fleet)) / mean,
        "busy": drafting / (load.verifiers if load.way == INSIDE else 1),
        "draft_ms": 1e3 * drafting / mean,
    }
    share = {"share": None if alone is None else round(verifier / alone, 3)}
    return {"verifiers": load.verifiers, "streams": load.streams, "way": load.way, **share, **rounded(figures)}


if __name__ == "__main__":
    main()
