"""How long streams pause when a verifier or a drafter dies, and whether guesses are as good after a session has moved.

Four parts, each on a fleet of two verifiers and two drafters, one gateway, the demo pair, drafts by the drafter tier
only, always 8 nodes a step:

* a verifier is killed under streams: their longest pause, which may be 1 s and the time to compute the context anew;
* a drafter is killed under streams: the time until drafts of another one are accepted, which may be 1 s;
* the engine of a verifier hangs under streams while its process lives: their longest pause, which may be the bound of
  its watchdog and 5 s;
* sessions are moved to another verifier by a mark to drain, and prompts come again that are in the prefix cache: the
  mean acceptance length from the 16th token after, against the same tokens of undisturbed sessions; 2 % may be lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tqdm import tqdm

from loadtest.faulty.orders import FOLDER_VARIABLE, HANG, order
from loadtest.flags import bench_parser
from loadtest.fleet import DEMO_PAIR, machine
from loadtest.histories import Event, History
from loadtest.scrape import scrape
from loadtest.steadfast import Request, mixed_requests, over_grpc, run_each, run_one
from paceline.client.resuming import ResumingClient
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, FleetSpec
from paceline.cluster.supervisor import BackOff
from paceline.core.params import DRAFT_MODEL
from paceline.store.opening import open_store

MOST_PAUSE_S = 1.0
MOST_DRAFTLESS_S = 1.0
# An engine that makes no step for that long is taken for hung.
ENGINE_STALL_S = 3.0
MOST_HUNG_S = ENGINE_STALL_S + 5.0
LEAST_RATIO = 0.98
# Tokens after a move, or after a prefix hit, that are not counted.
SETTLING_TOKENS = 16
# Streams are disturbed when each has so many tokens.
LEAD_TOKENS = 64
POLL_S = 0.01
WAIT_S = 30.0
SPECULATIVE = json.dumps({"method": DRAFT_MODEL, "num_speculative_tokens": 8, "policy": "fixed"})


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("failover", __doc__)
    parser.add_argument("--kills", type=int, default=5, help="of verifiers and of drafters (default 5 each)")
    parser.add_argument("--hangs", type=int, default=2, help="of engines (default 2)")
    parser.add_argument("--streams", type=int, default=4, help="side by side while something is killed (default 4)")
    parser.add_argument("--moved", type=int, default=16, help="sessions that are moved at once (default 16)")
    parser.add_argument("--max-tokens", type=int, default=384, help="tokens of a stream (default 384)")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What was measured; times in seconds.

    Attributes:
        pauses: Of streams whose verifier was killed, and what each was allowed.
        allowed: See `pauses`.
        draftless: From the death of a drafter to accepted drafts of another.
        hung: Pauses of streams whose verifier's engine hung.
        moved: Mean acceptance length of moved sessions over that of undisturbed ones.
        cached: The same of prefix hits.
    """

    pauses: Sequence[float]
    allowed: Sequence[float]
    draftless: Sequence[float]
    hung: Sequence[float]
    moved: float
    cached: float

    @property
    def ok(self) -> bool:
        """Whether all goals are met."""
        in_time = all(pause <= most for pause, most in zip(self.pauses, self.allowed, strict=True))
        resumed = bool(self.pauses) and in_time and bool(self.hung) and max(self.hung) <= MOST_HUNG_S
        drafted = max(self.draftless) <= MOST_DRAFTLESS_S
        return resumed and drafted and min(self.moved, self.cached) >= LEAST_RATIO


async def measure(options: argparse.Namespace) -> bool:
    """Runs the four parts; True when all goals are met."""
    with tempfile.TemporaryDirectory() as orders:
        fleet = LocalFleet(
            _spec(),
            environ={**os.environ, FOLDER_VARIABLE: orders},
            back_off=BackOff(first_s=0.2, most_s=0.5),
            modules={"verifier": "loadtest.faulty.verifier"},
        )
        async with fleet:
            gateway = fleet.endpoint("gateway").second_address
            async with ResumingClient([gateway]) as client:
                bench = _Bench(fleet, client, options, Path(orders))
                pauses, allowed = await bench.verifiers_killed()
                figures = Figures(
                    pauses=pauses,
                    allowed=allowed,
                    draftless=await bench.drafters_killed(),
                    hung=await bench.engines_hung(),
                    **await bench.sessions_moved(),
                )
    return _report(options, figures)


def _spec() -> FleetSpec:
    return FleetSpec(
        **{
            **FREE_PORTS,
            **DEMO_PAIR,
            "dtype": "float32",
            "num_verifiers": 2,
            "num_drafters": 2,
            # As on machines of their own: a drafter that lends its cores starts late when they are busy.
            "lend": False,
            "speculative_config": SPECULATIVE,
            "verifier_arg": (f"--engine-stall-s={ENGINE_STALL_S:g}",),
        }
    )


class _Bench:
    """The parts of the bench on one fleet."""

    def __init__(self, fleet: LocalFleet, client: ResumingClient, options: argparse.Namespace, orders: Path) -> None:
        self._fleet = fleet
        self._answer = over_grpc(client)
        self._options = options
        self._orders = orders

    async def verifiers_killed(self) -> tuple[list[float], list[float]]:
        """Returns the pauses of the streams on killed verifiers, and what each was allowed, in seconds."""
        pauses: list[float] = []
        allowed: list[float] = []
        for _ in tqdm(range(self._options.kills), desc="verifiers killed", unit="kill"):
            for pause, prefill_s in await self._pauses_after(self._fleet.kill):
                pauses.append(pause)
                allowed.append(MOST_PAUSE_S + prefill_s)
        return pauses, allowed

    async def engines_hung(self) -> list[float]:
        """Returns the pauses of the streams on verifiers whose engines hung, in seconds."""
        pauses: list[float] = []
        for _ in tqdm(range(self._options.hangs), desc="engines hung", unit="engine"):
            found = await self._pauses_after(lambda victim: order(self._orders, victim, HANG, WAIT_S))
            pauses += [pause for pause, _ in found]
        return pauses

    async def _pauses_after(self, harm: Callable[[str], None]) -> list[tuple[float, float]]:
        """Harms the busiest verifier for good: pauses of its streams, and what of each was computing anew."""
        victim, harmed_s = "", 0.0

        async def disturb() -> None:
            nonlocal victim, harmed_s
            victim = await self._busiest("verifier", "vllm:num_requests_running")
            harmed_s = time.perf_counter()
            harm(victim)

        restarts = {each.name: self._fleet.restart_count(each.name) for each in self._fleet.endpoints}
        streams = await self._streams_with(disturb)
        await self._fleet.until_restarted(victim, restarts[victim] + 1)
        found = [(stream.pause_after(harmed_s), stream.prefill_s) for stream in streams]
        # Only those that moved were computed anew; the others wait for nothing but the machine.
        return [(pause, prefill_s) for pause, prefill_s in found if pause and prefill_s and pause > MOST_PAUSE_S / 10]

    async def drafters_killed(self) -> list[float]:
        """Returns the times until drafts of another drafter were accepted, in seconds."""
        times: list[float] = []
        for _ in tqdm(range(self._options.kills), desc="drafters killed", unit="kill"):
            victim = ""

            async def kill() -> None:
                nonlocal victim
                victim = await self._busiest("drafter", "paceline:drafter_sessions")
                before = await self._verifier_counts("paceline:fallbacks_total{drafter_changed}")
                killed_s = time.perf_counter()
                self._fleet.kill(victim)
                times.append(await self._until_drafted_anew(before) - killed_s)

            restarts = {each.name: self._fleet.restart_count(each.name) for each in self._fleet.endpoints}
            await self._streams_with(kill)
            await self._fleet.until_restarted(victim, restarts[victim] + 1)
        return times

    async def sessions_moved(self) -> dict[str, float]:
        """Returns the mean acceptance length of moved sessions, and of prefix hits, over that of undisturbed ones."""
        requests = mixed_requests(self._options.moved, self._options.max_tokens, DRAFT_MODEL)
        async with open_store(self._fleet.redis_url) as store:

            async def only(name: str) -> None:
                for endpoint in self._fleet.endpoints_of("verifier"):
                    await store.drain(endpoint.name, draining=endpoint.name != name)

            await only("verifier-0")
            await asyncio.sleep(1.0)
            with tqdm(desc="sessions moved", total=3 * len(requests), unit="stream") as bar:
                first = await run_each(self._answer, requests, bar.update)
                again = await run_each(self._answer, requests, bar.update)
                drained_s = 0.0

                async def move() -> None:
                    nonlocal drained_s
                    drained_s = time.perf_counter()
                    await only("verifier-1")

                moved = await self._streams_with(move, requests)
                bar.update(len(requests))
        starts = [_first_token_after_pause(stream, drained_s) + SETTLING_TOKENS for stream in moved]
        settled = [SETTLING_TOKENS] * len(requests)
        return {
            "moved": _mean_length(moved, starts) / _mean_length(again, starts),
            "cached": _mean_length(again, settled) / _mean_length(first, settled),
        }

    async def _streams_with(
        self, disturb: Callable[[], Awaitable[None]], requests: Sequence[Request] = ()
    ) -> list[History]:
        """Runs streams to their end, and `disturb` when each has `LEAD_TOKENS`.

        Raises:
            RuntimeError: A stream failed.
        """
        requests = requests or mixed_requests(self._options.streams, self._options.max_tokens, DRAFT_MODEL)
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
        await disturb()
        streams = await asyncio.gather(*running)
        failed = [stream.error for stream in streams if stream.error]
        if failed:
            raise RuntimeError(f"{len(failed)} streams failed, first: {failed[0]}")
        return list(streams)

    async def _busiest(self, role: str, metric: str) -> str:
        endpoints = self._fleet.endpoints_of(role)
        pages = await asyncio.gather(*(scrape(endpoint.second_address) for endpoint in endpoints))
        loads = [page.get(metric, 0.0) for page in pages]
        return endpoints[loads.index(max(loads))].name

    async def _verifier_counts(self, metric: str) -> float:
        endpoints = self._fleet.endpoints_of("verifier")
        pages = await asyncio.gather(*(scrape(endpoint.second_address) for endpoint in endpoints))
        return sum(page.get(metric, 0.0) for page in pages)

    async def _until_drafted_anew(self, changed_before: float) -> float:
        """When drafts were accepted after sessions had changed their drafter; only drafts of the new one are left then.

        Raises:
            TimeoutError: They never were.
        """
        accepted_then: float | None = None
        async with asyncio.timeout(WAIT_S):
            while True:
                accepted = await self._verifier_counts("vllm:spec_decode_num_accepted_tokens_total")
                if accepted_then is not None and accepted > accepted_then:
                    return time.perf_counter()
                if accepted_then is None:
                    changed = await self._verifier_counts("paceline:fallbacks_total{drafter_changed}")
                    accepted_then = accepted if changed > changed_before else None
                await asyncio.sleep(POLL_S)


def _steps(history: History) -> list[Event]:
    """Pieces that brought tokens."""
    return [piece for piece in history.pieces if piece.token_ids]


def _first_token_after_pause(history: History, since_s: float) -> int:
    """Tokens that had come at the end of the longest pause after a time."""
    steps = _steps(history)
    gaps = [
        (later.at_s - sooner.at_s, number)
        for number, (sooner, later) in enumerate(pairwise(steps), start=1)
        if later.at_s > since_s
    ]
    return sum(len(step.token_ids) for step in steps[: max(gaps)[1]])


def _mean_length(histories: Sequence[History], starts: Sequence[int]) -> float:
    """Tokens a step, from a token of each stream on; the last step is left out, as the end cuts it short."""
    num_tokens = num_steps = 0
    for history, start in zip(histories, starts, strict=True):
        at = 0
        for step in _steps(history)[:-1]:
            if at >= start:
                num_tokens += len(step.token_ids)
                num_steps += 1
            at += len(step.token_ids)
    return num_tokens / max(1, num_steps)


def _report(options: argparse.Namespace, found: Figures) -> bool:
    pauses, draftless, hung = found.pauses, found.draftless, found.hung
    prefill_s = max(found.allowed, default=MOST_PAUSE_S) - MOST_PAUSE_S
    sys.stdout.write(
        f"verifier killed: pause {statistics.median(pauses):.2f} s median, {max(pauses):.2f} s at most of "
        f"{len(pauses)} streams (at most {MOST_PAUSE_S:g} s + {prefill_s:.2f} s to compute anew)\n"
        f"drafter killed:  drafted again after {statistics.median(draftless):.2f} s median, {max(draftless):.2f} s at "
        f"most of {len(draftless)} kills (at most {MOST_DRAFTLESS_S:g} s)\n"
        f"engine hung:     pause {statistics.median(hung):.2f} s median, {max(hung):.2f} s at most of {len(hung)} "
        f"streams (at most {MOST_HUNG_S:g} s, of which its watchdog waits {ENGINE_STALL_S:g} s)\n"
        f"mean acceptance length, from {SETTLING_TOKENS} tokens after: moved sessions {found.moved:.3f} of undisturbed "
        f"ones, prefix hits {found.cached:.3f} (at least {LEAST_RATIO:g})\n"
    )
    figures = {
        "bench": "failover",
        "machine": machine(),
        "batch_size": options.streams,
        "verifier_pause_p50_s": round(statistics.median(pauses), 3),
        "verifier_pause_max_s": round(max(pauses), 3),
        "prefill_max_s": round(prefill_s, 3),
        "drafter_p50_s": round(statistics.median(draftless), 3),
        "drafter_max_s": round(max(draftless), 3),
        "hung_pause_p50_s": round(statistics.median(hung), 3),
        "hung_pause_max_s": round(max(hung), 3),
        "moved_length_ratio": round(found.moved, 4),
        "prefix_hit_length_ratio": round(found.cached, 4),
        "ok": found.ok,
    }
    print(json.dumps(figures))
    return found.ok
