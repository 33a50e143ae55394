"""How long streams pause when a verifier or a drafter dies: `make bench NAME=failover`.

Three parts, on a fleet of two verifiers and two drafters, one gateway, the demo pair, drafts by the drafter tier only,
always 8 nodes a step:

* a verifier is killed under streams: their longest pause, which may be 1 s and the time to compute the context anew;
* a drafter is killed under streams: the time until drafts of another one are accepted, which may be 1 s;
* a verifier's engine hangs under streams while its process is alive: their longest pause, which may be the bound of
  its watchdog and 5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from tqdm import tqdm

from loadtest.bench import bench_parser, report, run
from loadtest.faulty.orders import FOLDER_VARIABLE, HANG, order
from loadtest.fleet import DEMO_PAIR, bench_fleet
from loadtest.histories import History
from loadtest.steadfast import mixed_requests, over, run_one
from paceline.client.resuming import ResumingClient
from paceline.cluster.local import LocalFleet
from paceline.core.params import DRAFT_MODEL
from paceline.service.supervision import BackOff
from tools.scrape import scrape

MOST_PAUSE_S = 1.0
MOST_DRAFTLESS_S = 1.0
# An engine that makes no step for that long is taken for hung.
ENGINE_STALL_S = 3.0
MOST_HUNG_S = ENGINE_STALL_S + 5.0
# Streams are disturbed when each has that many tokens.
LEAD_TOKENS = 64
POLL_S = 0.01
WAIT_S = 30.0
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
CHANGED = "paceline:fallbacks_total{drafter_changed}"
SETTINGS = {
    **DEMO_PAIR,
    "dtype": "float32",
    "num_verifiers": 2,
    "num_drafters": 2,
    # As on machines of their own: a drafter that lends its cores starts late when they are busy.
    "lend": False,
    "speculative_config": json.dumps({"method": DRAFT_MODEL, "num_speculative_tokens": 8, "policy": "fixed"}),
    "verifier_arg": (f"--engine-stall-s={ENGINE_STALL_S:g}",),
}
LAUNCHER = {"back_off": BackOff(first_s=0.2, most_s=0.5), "modules": {"verifier": "loadtest.faulty.verifier"}}


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("failover", __doc__)
    parser.add_argument("--kills", type=int, default=5, help="of verifiers and of drafters (default 5 each)")
    parser.add_argument("--hangs", type=int, default=2, help="of engines (default 2)")
    parser.add_argument("--streams", type=int, default=4, help="side by side while something is killed (default 4)")
    parser.add_argument("--max-tokens", type=int, default=384, help="tokens of a stream (default 384)")
    run(parser, measure)


async def measure(options: argparse.Namespace) -> bool:
    """Runs the three parts; True when all goals are met."""
    async with AsyncExitStack() as stack:
        orders = stack.enter_context(tempfile.TemporaryDirectory())
        fleet = bench_fleet(environ={FOLDER_VARIABLE: orders}, launcher=LAUNCHER, **SETTINGS)
        await stack.enter_async_context(fleet)
        client = await stack.enter_async_context(ResumingClient([fleet.endpoint("gateway").second_address]))
        bench = _Bench(fleet, client, options, Path(orders))
        killed = await bench.pauses("verifiers killed", options.kills, fleet.kill)
        draftless = await bench.drafters_killed()
        hung = await bench.pauses("engines hung", options.hangs, bench.hang)
    pauses, hangs = [pause for pause, _ in killed], [pause for pause, _ in hung]
    prefill_s = max((each for _, each in killed), default=0.0)
    in_time = (
        all(pause <= MOST_PAUSE_S + prefill for pause, prefill in killed) and max(hangs, default=9e9) <= MOST_HUNG_S
    )
    drafted = max(draftless) <= MOST_DRAFTLESS_S
    limits = f"pause {MOST_PAUSE_S:g} s + prefill, drafter {MOST_DRAFTLESS_S:g} s, hung {MOST_HUNG_S:g} s"
    print(f"{len(pauses)} streams, {len(draftless)} drafters, {len(hangs)} hung streams; at most: {limits}")
    return report(
        "failover",
        batch_size=options.streams,
        **_quantiles("verifier_pause", pauses),
        prefill_max_s=round(prefill_s, 3),
        **_quantiles("drafter", draftless),
        **_quantiles("hung_pause", hangs),
        ok=bool(pauses) and in_time and drafted,
    )


def _quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    p50, most = statistics.median(values), max(values)
    print(f"{name:15} {p50:.2f} s median, {most:.2f} s at most")
    return {f"{name}_p50_s": round(p50, 3), f"{name}_max_s": round(most, 3)}


class _Bench:
    """The parts of the bench on one fleet."""

    def __init__(self, fleet: LocalFleet, client: ResumingClient, options: argparse.Namespace, orders: Path) -> None:
        self._fleet = fleet
        self._answer = over(client)
        self._options = options
        self._orders = orders

    def hang(self, victim: str) -> None:
        """Lets the engine of a verifier hang for good."""
        order(self._orders, victim, HANG, WAIT_S)

    async def pauses(self, title: str, times: int, harm: Callable[[str], None]) -> list[tuple[float, float]]:
        """Harms the busiest verifier: pauses of its streams, and the part of each that was computing anew, in s."""
        found: list[tuple[float, float]] = []
        for _ in tqdm(range(times), desc=title, unit="time"):
            harmed_s = 0.0

            async def disturb() -> str:
                nonlocal harmed_s
                victim = await self._busiest("verifier", "vllm:num_requests_running")
                harmed_s = time.perf_counter()
                harm(victim)
                return victim

            for stream in await self._streams_past(disturb):
                pause = stream.pause_after(harmed_s)
                # Only those that moved were computed anew; the others wait for nothing but the machine.
                if pause and stream.prefill_s and pause > MOST_PAUSE_S / 10:
                    found.append((pause, stream.prefill_s))
        return found

    async def drafters_killed(self) -> list[float]:
        """Returns the times until drafts of another drafter were accepted, in seconds."""
        times: list[float] = []

        async def kill() -> str:
            victim = await self._busiest("drafter", "paceline:drafter_sessions")
            before = await self._verifiers_count(CHANGED)
            killed_s = time.perf_counter()
            self._fleet.kill(victim)
            times.append(await self._until_drafted_anew(before) - killed_s)
            return victim

        for _ in tqdm(range(self._options.kills), desc="drafters killed", unit="time"):
            await self._streams_past(kill)
        return times

    async def _streams_past(self, disturb: Callable[[], Awaitable[str]]) -> list[History]:
        """Runs streams to their end, and when each has `LEAD_TOKENS` ends a process; waits for its successor.

        Args:
            disturb: Ends a process and returns its name.

        Raises:
            RuntimeError: A stream failed.
        """
        requests = mixed_requests(self._options.streams, self._options.max_tokens, DRAFT_MODEL)
        restarts = {each.name: self._fleet.restart_count(each.name) for each in self._fleet.endpoints}
        leading: set[int] = set()
        all_lead = asyncio.Event()

        def on_piece(stream: History) -> None:
            if len(stream.token_ids) >= LEAD_TOKENS:
                leading.add(stream.index)
            if len(leading) == len(requests):
                all_lead.set()

        running = [
            asyncio.create_task(run_one(self._answer, request, index, on_piece))
            for index, request in enumerate(requests)
        ]
        await all_lead.wait()
        victim = await disturb()
        streams = await asyncio.gather(*running)
        failed = [stream.error for stream in streams if stream.error]
        if failed:
            raise RuntimeError(f"{len(failed)} streams failed, first: {failed[0]}")
        await self._fleet.until_restarted(victim, restarts[victim] + 1)
        return list(streams)

    async def _loads(self, role: str, metric: str) -> dict[str, float]:
        endpoints = self._fleet.endpoints_of(role)
        pages = await asyncio.gather(*(scrape(endpoint.second_address) for endpoint in endpoints))
        return {endpoint.name: page.get(metric, 0.0) for endpoint, page in zip(endpoints, pages, strict=True)}

    async def _busiest(self, role: str, metric: str) -> str:
        loads = await self._loads(role, metric)
        return max(loads, key=lambda name: loads[name])

    async def _verifiers_count(self, metric: str) -> float:
        return sum((await self._loads("verifier", metric)).values())

    async def _until_drafted_anew(self, changed_before: float) -> float:
        """When drafts were accepted after sessions had changed their drafter; only drafts of the new one are left then.

        Raises:
            TimeoutError: They never were.
        """
        accepted_then: float | None = None
        async with asyncio.timeout(WAIT_S):
            while True:
                accepted = await self._verifiers_count(ACCEPTED)
                if accepted_then is not None and accepted > accepted_then:
                    return time.perf_counter()
                if accepted_then is None:
                    accepted_then = accepted if await self._verifiers_count(CHANGED) > changed_before else None
                await asyncio.sleep(POLL_S)
