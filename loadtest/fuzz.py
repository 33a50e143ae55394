"""100,000 bad messages to all doors of a running fleet: `make bench NAME=fuzz`.

A fleet of processes (gateway, verifier, drafter, store; the bundled demo pair in float32) gets bad messages, seeded,
over several connections at once: HTTP requests to the gateway, gRPC calls to the gateway and to the verifier, streams
to the drafter. There are bytes that are no message, messages cut short or changed, fields beyond their limits, tokens
outside the vocabulary, numbers of thousands of digits, hostile tools, schemas, grammars and messages (`bodies`),
histories of agents out of their order (`agents`), bodies and messages that are too large, and streams that break the
protocol's order. Each kind has its right statuses; the table counts what came. A fifth as many messages in columns go
to the engines behind the wire, in a process of their own (`columns`).

Judged are: every message is answered, none with a status that is not right for it (5xx, INTERNAL and UNKNOWN never
are), and a history that is refused with the place in it; the resident memory of no service grows from the end of the
first quarter, in which caches and pools fill, to the end by more than 3 % + 4 MiB; the event loops of gateway and
verifier never compute for 50 ms without a pause, in CPU time; no session is left over; every process is the one that
was there at the start; and a good completion after it all has the text that it had before. The gateway has half of the
cores, so that its stalls are its own. Loops whose bounds are checked and loops as they serve make the same of the
columns, and their processes survive.

    make bench NAME=fuzz ARGS='--messages 10000 --seed 7'
    make bench NAME=fuzz ARGS='--doors agents --messages 20000'
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from tqdm import tqdm

from loadtest.bad import agents, bodies, columns, http, rpc
from loadtest.bad.doors import Door, GrpcDoor, HttpDoor, send_all
from loadtest.bad.kinds import Bad, Kind, Target, bad_messages
from loadtest.bench import MIB, bench_parser, report, run, show
from loadtest.client import completed
from loadtest.fleet import DEMO_PAIR, bench_fleet
from loadtest.streams import Ask
from paceline.cluster.local import LocalFleet
from paceline.core.messages import GATEWAY
from paceline.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from tools.procfs import keep_to, resident_bytes
from tools.scrape import scrape, sessions_left

GROWTH_SHARE, GROWTH_MIB = 0.03, 4.0
KINDS: Mapping[str, Sequence[Kind]] = {
    "http": http.KINDS,
    "bodies": bodies.KINDS,
    "agents": agents.KINDS,
    "gateway": rpc.GATEWAY_KINDS,
    "verifier": rpc.VERIFIER_KINDS,
    "drafter": rpc.DRAFTER_KINDS,
}
# Shares of all messages.
SHARES = {"http": 0.15, "bodies": 0.15, "agents": 0.2, "gateway": 0.15, "verifier": 0.2, "drafter": 0.15}
HTTP_DOORS = ("http", "bodies", "agents")
CONNECTIONS = 4
# Messages in columns: one for this number of others.
COLUMNS_OF = 5
REST_S = 30
# Entries that the store keeps by design expire within a few seconds, so that growth is a leak.
KEPT_BRIEFLY = ("--response-ttl-s=5", "--record-ttl-s=10")
TAKES_TEMPLATES = ("--trust-request-chat-template",)
# KV pages take memory when they are first written, so there are few: all of them are written in the first quarter.
FEW_PAGES = ("--num-kv-blocks=400",)
STALL = "paceline:event_loop_stall_cpu_seconds"
MAX_STALL_S = 0.05
# Seconds that the gauge covers: stalls of the start are older then.
STALLS_COVERED_S = 60
STALLS_EVERY_S = 20.0
GOOD = Ask(prompt="The drafter guesses, and the verifier", max_tokens=48, seed=11)


@dataclass(slots=True)
class Tally:
    """Answers, by door, kind and status."""

    counts: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    wrong: Counter[str] = field(default_factory=Counter)
    num_answers: int = 0

    def take(self, door: str, bad: Bad, status: str) -> None:
        """Counts one answer."""
        self.counts.setdefault((door, bad.kind.name), Counter())[status] += 1
        self.num_answers += 1
        if status not in bad.kind.right:
            self.wrong[f"{door}, {bad.kind.name}: {status}"] += 1


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("fuzz", __doc__)
    parser.add_argument("--messages", type=int, default=100_000, help="bad messages in all (default 100000)")
    doors = f"of {', '.join(SHARES)} (default all)"
    parser.add_argument("--doors", nargs="+", choices=SHARES, default=[*SHARES], metavar="DOOR", help=doors)
    parser.add_argument("--seed", type=int, default=1, help="the same seed sends the same messages (default 1)")
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs the bench and prints the table; True when all that is judged is well."""
    if arguments.messages < 100:
        raise SystemExit(f"--messages must be at least 100, so that every kind comes, got {arguments.messages}")
    async with bench_fleet(
        **DEMO_PAIR,
        dtype="float32",
        gateway_arg=(*KEPT_BRIEFLY, *TAKES_TEMPLATES),
        verifier_arg=FEW_PAGES,
        drafter_arg=FEW_PAGES,
    ) as fleet:
        tally, figures = await _measure_fleet(fleet, arguments)
    number = arguments.messages // COLUMNS_OF
    checked, compiled = [await columns.outcomes(arguments.seed, number, checked=each) for each in (True, False)]
    figures |= {"columns_checked": checked, "columns_compiled": compiled}
    show({"door": door, "kind": kind, "answers": _counted(counts)} for (door, kind), counts in tally.counts.items())
    show({"process": name, **row} for name, row in figures["memory_mib"].items())
    rest = {name: value for name, value in figures.items() if name != "memory_mib"}
    print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in rest.items()))
    well = (
        figures["messages"] >= arguments.messages - len(SHARES)
        and not figures["wrong"]
        and max(figures["longest_stall_ms"].values()) < 1e3 * MAX_STALL_S
        and not figures["sessions_left"]
        and figures["same_processes"]
        and figures["same_text"]
        and isinstance(checked, dict)
        and checked == compiled
        and all(row["ok"] for row in figures["memory_mib"].values())
    )
    return report("fuzz", seed=arguments.seed, **figures, ok=well)


def _counted(counts: Mapping[str, int]) -> str:
    return " ".join(f"{answer}:{count}" for answer, count in counts.items())


def _part_cores(fleet: LocalFleet) -> None:
    """Gives the gateway one half of the cores and everybody else the other, so that its own work is seen."""
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    if half:
        for endpoint in fleet.endpoints:
            keep_to(fleet.pid(endpoint.name), cpus[:half] if endpoint.role == GATEWAY else cpus[half:])
        keep_to(os.getpid(), cpus[half:])


async def _measure_fleet(fleet: LocalFleet, arguments: argparse.Namespace) -> tuple[Tally, dict[str, Any]]:
    pids = {endpoint.name: fleet.pid(endpoint.name) for endpoint in fleet.endpoints}
    _part_cores(fleet)
    before = (await completed(fleet.gateway_url, GOOD)).text
    gateway = fleet.endpoint("gateway")
    addresses = dict.fromkeys(HTTP_DOORS, gateway.address) | {"gateway": gateway.second_address}
    addresses |= {role: fleet.endpoint(role).address for role in ("verifier", "drafter")}
    target = await _target(gateway.second_address)
    memory: list[dict[str, float]] = []

    def look() -> None:
        memory.append({name: resident_bytes(pid) / MIB for name, pid in pids.items()})

    watched = {"gateway": gateway.address, "verifier": fleet.endpoint("verifier").second_address}
    async with _stalls_watched(watched) as stalls_s:
        started_s = time.monotonic()
        tally = await fuzz(addresses, target, arguments.seed, arguments.messages, arguments.doors, at_quarter=look)
        seconds = time.monotonic() - started_s
    left = await sessions_left(fleet)
    for _ in range(REST_S if left else 0):
        await asyncio.sleep(1)
        left = await sessions_left(fleet)
        if not left:
            break
    look()
    return tally, {
        "messages": tally.num_answers,
        "seconds": round(seconds, 1),
        "messages_per_s": round(tally.num_answers / seconds),
        "wrong": dict(tally.wrong),
        "memory_mib": _growths(*memory),
        "longest_stall_ms": {name: round(1e3 * max(each), 1) for name, each in stalls_s.items()},
        "sessions_left": left,
        "same_processes": {name: fleet.pid(name) for name in pids} == pids,
        "same_text": (await completed(fleet.gateway_url, GOOD)).text == before,
    }


@asynccontextmanager
async def _stalls_watched(addresses: Mapping[str, str]) -> AsyncIterator[dict[str, list[float]]]:
    """Collects the stalls of services while a block runs, s; those of their starts are past."""
    stalls_s: dict[str, list[float]] = {name: [] for name in addresses}

    async def look() -> dict[str, float]:
        return {name: (await scrape(address))[STALL] for name, address in addresses.items()}

    async def note() -> None:
        for name, stall_s in (await look()).items():
            stalls_s[name].append(stall_s)

    async def watch() -> None:
        while True:
            await asyncio.sleep(STALLS_EVERY_S)
            await note()

    for _ in range(STALLS_COVERED_S):
        if max((await look()).values()) < MAX_STALL_S / 2:
            break
        await asyncio.sleep(1)
    watching = asyncio.create_task(watch())
    try:
        yield stalls_s
        await note()
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def fuzz(
    addresses: Mapping[str, str],
    target: Target,
    seed: int,
    count: int,
    doors: Sequence[str] = tuple(SHARES),
    at_quarter: Callable[[], None] = lambda: None,
) -> Tally:
    """Sends bad messages to these doors at once.

    Args:
        addresses: `host:port` by door.
        target: The model behind them.
        seed: Seed of the messages.
        count: Messages in all.
        doors: Names of doors, of `SHARES`.
        at_quarter: Called when a quarter of them was answered.
    """
    tally = Tally()
    whole = sum(SHARES[door] for door in doors)
    shares = {door: round(SHARES[door] * count / whole) for door in doors}
    total = sum(shares.values())
    with tqdm(total=total, desc="bad messages", unit="message", leave=False, miniters=200) as bar:

        async def send(door: str, connections: Sequence[Door]) -> None:
            def on_answer(bad: Bad, status: str) -> None:
                tally.take(door, bad, status)
                bar.update()
                if tally.num_answers == total // 4:
                    at_quarter()

            await send_all(connections, bad_messages(KINDS[door], target, seed, shares[door]), on_answer)

        with open_doors(addresses, doors) as ways:
            await asyncio.gather(*(send(door, connections) for door, connections in ways.items()))
    return tally


@contextmanager
def open_doors(
    addresses: Mapping[str, str], doors: Sequence[str] = tuple(SHARES)
) -> Iterator[dict[str, Sequence[Door]]]:
    """Gives the ways into each service, several of each; `send_all` closes them."""
    with ThreadPoolExecutor(CONNECTIONS * len(doors), thread_name_prefix="door") as executor:

        def opened(door: str) -> Door:
            return HttpDoor(addresses[door]) if door in HTTP_DOORS else GrpcDoor(addresses[door], executor)

        yield {door: [opened(door) for _ in range(CONNECTIONS)] for door in doors}


async def _target(gateway: str) -> Target:
    async with grpc.aio.insecure_channel(gateway, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
        [model] = (await stub.ListModels(gateway_pb2.ListModelsRequest())).models
    return Target(vocab_hash=model.vocab_hash, vocab_size=model.vocab_size, context_len=model.context_len)


def _growths(quarter: Mapping[str, float], end: Mapping[str, float]) -> dict[str, dict[str, float | bool]]:
    growths: dict[str, dict[str, float | bool]] = {}
    for name, first in quarter.items():
        limit, growth = GROWTH_SHARE * first + GROWTH_MIB, end[name] - first
        figures = {"quarter": first, "end": end[name], "growth": growth, "limit": limit}
        growths[name] = {**{key: round(value, 1) for key, value in figures.items()}, "ok": growth <= limit}
    return growths
