"""Client results while services of a busy fleet go and come, on simulated devices: `make bench NAME=disruption`.

Two replicas of each service, at the pace of the profile. Streams over gRPC that come again when one ends: first the
load of a fleet that has just started; then a drafter is killed, a verifier is killed, and every service is restarted in
turn, as in a rollout. In the table:

* before, during, after: tokens/s of all streams; during is from the deed until all replicas are well again, of the
  first load the first seconds
* pause_s: the longest time without a token of a stream under way, and of the median stream

The bench is met when every stream got its whole text: of simulated texts each token follows from all before it, so
nothing can be lost, doubled or changed unseen. Figures of one machine: all replicas and the client share its cores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from tqdm import tqdm

from loadtest.bench import bench_parser, report, run, show
from loadtest.fleet import bench_fleet
from loadtest.histories import History, judge
from loadtest.steadfast import Answer, Request, keep_running, over, run_each
from paceline.client.resuming import ResumingClient
from paceline.cluster.local import LocalFleet
from paceline.planning.report import tokens_of
from paceline.rpc.v1 import common_pb2
from paceline.service.supervision import BackOff

PROFILE = "70b+1b@4xh100+h100"
TIERS = ("drafter", "verifier", "gateway")
PATIENCE_S = 60.0


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("disruption", __doc__)
    parser.add_argument("--profile", default=PROFILE, help=f"as of paceline up --simulate (default {PROFILE})")
    parser.add_argument("--streams", type=int, default=64, help="at once (default 64)")
    parser.add_argument("--max-tokens", type=int, default=160, help="mean tokens of a text (default 160)")
    parser.add_argument("--seconds", type=float, default=8.0, help="before and after each deed (default 8)")
    run(parser, measure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """Something that is done to the fleet, and four moments: of its stretch before, during and after.

    Attributes:
        name: In the table.
        times_s: When the stretch before began, the deed, all were well again, and the stretch after ended.
    """

    name: str
    times_s: tuple[float, float, float, float]


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs all deeds; True when no stream lost anything."""
    requests = [request_of(number, arguments.max_tokens) for number in range(arguments.streams)]
    replicas: dict[str, Any] = {f"num_{tier}s": 2 for tier in TIERS}
    launcher = {"back_off": BackOff(first_s=0.2, most_s=0.5)}
    async with bench_fleet(simulate=arguments.profile, launcher=launcher, grace_s=8.0, **replicas) as fleet:
        gateways = [each.second_address for each in fleet.endpoints_of("gateway")]
        async with ResumingClient(gateways, patience_s=PATIENCE_S, silence_s=PATIENCE_S) as client:
            answer = over(client)
            started_s = time.perf_counter()
            reference = await run_each(answer, requests)
            histories, deeds = await disturbed(fleet, answer, requests, arguments.seconds)
            num_resumed = client.num_resumed
    verdict = judge(histories, reference)
    rows = [first_load(reference, started_s, arguments.seconds), *(row_of(deed, histories) for deed in deeds)]
    show(rows)
    print(f"{len(histories)} streams, {num_resumed} resumed, {asdict(verdict)}")
    return report(
        "disruption",
        simulated=True,
        profile=arguments.profile,
        batch_size=arguments.streams,
        streams=len(histories),
        resumed=num_resumed,
        rows=rows,
        **asdict(verdict),
        ok=verdict.clean,
    )


def request_of(number: int, mean_tokens: int) -> Request:
    """A request with a prompt and a length of its own."""
    sampling = common_pb2.SamplingParams(
        max_tokens=tokens_of(number, mean_tokens), top_p=1.0, repetition_penalty=1.0, ignore_eos=True, seed=number
    )
    return Request(
        prompt=f"request number {number} of this load, and ",
        sampling=sampling,
        speculation=common_pb2.SpeculationParams(enabled=True),
    )


async def disturbed(
    fleet: LocalFleet, answer: Answer, requests: Sequence[Request], seconds: float
) -> tuple[list[History], list[Deed]]:
    """Keeps all streams running while one deed after the other is done."""
    deeds: list[Deed] = []
    acts: dict[str, Callable[[], Awaitable[None]]] = {
        "drafter killed": lambda: replaced(fleet, "drafter-0", fleet.kill),
        "verifier killed": lambda: replaced(fleet, "verifier-0", fleet.kill),
        "rolling restart": lambda: rolled(fleet),
    }

    async def act() -> None:
        for name, do in tqdm(acts.items(), unit="deed"):
            times_s = [time.perf_counter()]
            await asyncio.sleep(seconds)
            times_s.append(time.perf_counter())
            await do()
            times_s.append(time.perf_counter())
            await asyncio.sleep(seconds)
            before_s, done_s, well_s, end_s = (*times_s, time.perf_counter())
            deeds.append(Deed(name=name, times_s=(before_s, done_s, well_s, end_s)))

    acting = asyncio.create_task(act())
    histories = await keep_running([answer], requests, acting.done, lambda _: None)
    await acting
    return histories, deeds


async def replaced(fleet: LocalFleet, name: str, end: Callable[[str], None]) -> None:
    """Ends a process, and returns when its successor is well."""
    count = fleet.restart_count(name)
    end(name)
    await fleet.until_restarted(name, count + 1)


async def rolled(fleet: LocalFleet) -> None:
    """Restarts all services, one replica after the other."""
    for tier in TIERS:
        for endpoint in fleet.endpoints_of(tier):
            await replaced(fleet, endpoint.name, fleet.terminate)


def first_load(histories: Sequence[History], started_s: float, seconds: float) -> dict[str, Any]:
    """The row of a fleet that has just started: its first second is `during`, the next ones `after`."""
    first_s, end_s = started_s + 1.0, started_s + seconds
    last_s = min(end_s, *(each.events[-1].at_s for each in histories))
    return figures("first load", histories, (started_s, started_s, first_s, max(first_s + 0.1, last_s)))


def row_of(deed: Deed, histories: Sequence[History]) -> dict[str, Any]:
    """The row of a deed."""
    return figures(deed.name, histories, deed.times_s)


def figures(name: str, histories: Sequence[History], times_s: tuple[float, float, float, float]) -> dict[str, Any]:
    """Client results in three stretches between four moments, and how long they waited in the second."""
    before, during, after = (rate(histories, since_s, until_s) for since_s, until_s in pairwise(times_s))
    _, done_s, well_s, _ = times_s
    pauses = [pause for each in histories if (pause := longest_pause_s(each, done_s, well_s)) is not None]
    return {
        "deed": name,
        "before": before,
        "during": during,
        "after": after,
        "during_s": round(well_s - done_s, 2),
        "pause_s": {"most": round(max(pauses), 2), "median": round(statistics.median(pauses), 3)},
    }


def rate(histories: Sequence[History], since_s: float, until_s: float) -> float | None:
    """Tokens/s of all streams within a time; None for no time."""
    if until_s <= since_s:
        return None
    count = sum(len(piece.token_ids) for each in histories for piece in each.pieces if since_s <= piece.at_s < until_s)
    return round(count / (until_s - since_s), 1)


def longest_pause_s(history: History, since_s: float, until_s: float) -> float | None:
    """The longest time between two pieces of a stream that touches a time; None if there was none then."""
    times_s = [piece.at_s for piece in history.pieces]
    return max(
        (later - sooner for sooner, later in pairwise(times_s) if later > since_s and sooner < until_s), default=None
    )


if __name__ == "__main__":
    main()
