"""100,000 bad messages to all doors of a running fleet. `make bench NAME=fuzz`.

A fleet of processes (gateway, verifier, drafter, store; the bundled demo pair in float32) is sent bad messages, seeded,
over several connections at once: HTTP requests to the gateway, gRPC calls to the gateway and to the verifier, streams
to the drafter. There are bytes that are no message, messages cut short or changed, fields beyond their limits, tokens
outside the vocabulary, numbers of thousands of digits, hostile tools, schemas, grammars and messages (`bodies`), bodies
and messages that are too large, and streams that break the protocol's order. Each kind has the statuses that are right
for it; the table counts what came.

Judged are: every message is answered, none with a status that is not right for it (5xx, INTERNAL and UNKNOWN never
are); the resident memory of no service grows from the end of the first quarter, in which caches and pools fill, to the
end by more than 3 % + 4 MiB; the gateway's event loop never stands still for 50 ms; no session is left over; every
process is the one that was there at the start; and a good completion after it all has the text that it had before. The
gateway has half of the cores, so that its stalls are its own.

Then 64 callers without a key send messages of 4 MiB to both doors of a gateway that asks for keys
(`loadtest/keyless.py`). Judged are its memory, which grows by less than 64 MiB, and the pace of a stream under way: its
event loop never stands still for 50 ms.

    make bench NAME=fuzz ARGS='--messages 10000 --seed 7'
    make bench NAME=fuzz ARGS='--doors bodies --messages 20000'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop
from tqdm import tqdm

from loadtest.bad import bodies, http, rpc
from loadtest.bad.kinds import Bad, Kind, Target, bad_messages
from loadtest.client import Ask, complete, http_client
from loadtest.doors import CallDoor, Door, HttpDoor, StreamDoor, send_all
from loadtest.flags import bench_parser
from loadtest.fleet import bench_fleet, machine
from loadtest.keyless import (
    MAX_STALL_S,
    keyed_settings,
    longest_stall_s,
    measure_keyless,
    part_cores,
    stalls_of_the_start_past,
    write_keys,
)
from loadtest.procfs import resident_bytes
from loadtest.scrape import sessions_left
from paceline.cluster.local import LocalFleet
from paceline.rpc.v1 import gateway_pb2, gateway_pb2_grpc

MIB = 1024 * 1024
GROWTH_SHARE, GROWTH_MIB = 0.03, 4.0
# Of all messages.
SHARES: Mapping[str, float] = {"http": 0.2, "bodies": 0.2, "gateway": 0.2, "verifier": 0.25, "drafter": 0.15}
KINDS: Mapping[str, Sequence[Kind]] = {
    "http": http.KINDS,
    "bodies": bodies.KINDS,
    "gateway": rpc.GATEWAY_KINDS,
    "verifier": rpc.VERIFIER_KINDS,
    "drafter": rpc.DRAFTER_KINDS,
}
CONNECTIONS = {"http": 4, "bodies": 4, "gateway": 4, "verifier": 4, "drafter": 4}
REST_S = 30
# What the store keeps by design is gone within a few seconds, so that what grows is a leak.
KEPT_BRIEFLY = ("--response-ttl-s=5", "--record-ttl-s=10")
# The gauge tells of the last minute.
STALLS_EVERY_S = 20.0
GOOD = Ask(prompt="The drafter guesses, and the verifier", max_tokens=48, seed=11)


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where the doors are, `host:port`."""

    http: str
    gateway: str
    verifier: str
    drafter: str


@dataclass(slots=True)
class Tally:
    """What was answered, by door, kind and status."""

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
    parser.add_argument(
        "--doors",
        nargs="+",
        choices=SHARES,
        default=[*SHARES],
        metavar="DOOR",
        help=f"of {', '.join(SHARES)} (default all)",
    )
    parser.add_argument("--seed", type=int, default=1, help="the same seed sends the same messages (default 1)")
    parser.add_argument("--keyless-s", type=float, default=30.0, help="seconds of callers without a key (default 30)")
    arguments = parser.parse_args()
    if arguments.messages < 100:
        parser.error(f"--messages must be at least 100, so that every kind comes, got {arguments.messages}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raise SystemExit(0 if runner.run(measure(arguments)) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs the bench and prints the table; True when all that is judged is well."""
    async with bench_fleet(gateway_arg=KEPT_BRIEFLY, **keyed_settings()) as fleet:
        tally, figures = await _measure_fleet(fleet, arguments)
    figures["without_keys"] = await _keyless(arguments.keyless_s)
    figures["ok"] = _is_well(figures, arguments.messages)
    _print_table(tally, figures)
    print(json.dumps({"bench": "fuzz", "machine": machine(), "seed": arguments.seed, **figures}))
    return bool(figures["ok"])


async def _measure_fleet(fleet: LocalFleet, arguments: argparse.Namespace) -> tuple[Tally, dict[str, Any]]:
    names = [endpoint.name for endpoint in fleet.endpoints]
    pids = {name: fleet.pid(name) for name in names}
    part_cores(fleet)
    before = await _good_text(fleet)
    addresses = _addresses(fleet)
    target = await _target(addresses.gateway)
    memory: list[dict[str, float]] = []

    def look() -> None:
        memory.append({name: resident_bytes(pid) / MIB for name, pid in pids.items()})

    async with _stalls_watched(addresses.http) as stalls_s:
        started_s = time.monotonic()
        tally = await fuzz(addresses, target, arguments.seed, arguments.messages, arguments.doors, at_quarter=look)
        seconds = time.monotonic() - started_s
    left = await _rest(fleet)
    look()
    return tally, {
        "messages": tally.num_answers,
        "seconds": round(seconds, 1),
        "messages_per_s": round(tally.num_answers / seconds),
        "wrong": dict(tally.wrong),
        "memory_mib": _growths(*memory),
        "longest_stall_ms": round(1e3 * max(stalls_s), 1),
        "sessions_left": left,
        "same_processes": {name: fleet.pid(name) for name in names} == pids,
        "same_text": await _good_text(fleet) == before,
    }


@asynccontextmanager
async def _stalls_watched(address: str) -> AsyncIterator[list[float]]:
    """Collects the gateway's stalls while a block runs, s; those of its start are past."""
    stalls_s: list[float] = []
    async with http_client() as client:

        async def watch() -> None:
            while True:
                await asyncio.sleep(STALLS_EVERY_S)
                stalls_s.append(await longest_stall_s(client, address))

        await stalls_of_the_start_past(client, address)
        watching = asyncio.create_task(watch())
        try:
            yield stalls_s
            stalls_s.append(await longest_stall_s(client, address))
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def _keyless(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        write_keys(keys)
        async with bench_fleet(gateway_arg=("--api-keys-file", str(keys)), **keyed_settings()) as fleet:
            return await measure_keyless(fleet, seconds)


async def fuzz(
    addresses: Addresses,
    target: Target,
    seed: int,
    count: int,
    doors: Sequence[str] = tuple(SHARES),
    at_quarter: Callable[[], None] = lambda: None,
) -> Tally:
    """Sends so many bad messages to these doors at once.

    Args:
        addresses: Where the doors are.
        target: The model behind them.
        seed: Of the messages.
        count: Messages in all.
        doors: Names of doors, of `SHARES`.
        at_quarter: Called when a quarter of them was answered.
    """
    tally = Tally()
    whole = sum(SHARES[door] for door in doors)
    shares = {door: round(SHARES[door] * count / whole) for door in doors}
    with tqdm(total=sum(shares.values()), desc="bad messages", unit="message", leave=False, miniters=200) as bar:

        def told(door: str, bad: Bad, status: str) -> None:
            tally.take(door, bad, status)
            bar.update()
            if tally.num_answers == sum(shares.values()) // 4:
                at_quarter()

        def sending(door: str, connections: Sequence[Door]) -> Any:
            messages = bad_messages(KINDS[door], target, seed, shares[door])
            return send_all(connections, messages, lambda bad, status: told(door, bad, status))

        with open_doors(addresses, doors) as ways:
            await asyncio.gather(*(sending(door, connections) for door, connections in ways.items()))
    return tally


@contextmanager
def open_doors(addresses: Addresses, doors: Sequence[str] = tuple(SHARES)) -> Iterator[dict[str, Sequence[Door]]]:
    """Gives the ways into each service, several of each; `send_all` closes them."""
    host, port = addresses.http.rsplit(":", 1)
    with ThreadPoolExecutor(CONNECTIONS["drafter"], thread_name_prefix="drafter") as executor:
        ways: dict[str, Callable[[], Door]] = {
            "http": lambda: HttpDoor(host, int(port)),
            "bodies": lambda: HttpDoor(host, int(port)),
            "gateway": lambda: CallDoor(addresses.gateway),
            "verifier": lambda: CallDoor(addresses.verifier),
            "drafter": lambda: StreamDoor(addresses.drafter, executor),
        }
        yield {door: [ways[door]() for _ in range(CONNECTIONS[door])] for door in doors}


def _addresses(fleet: LocalFleet) -> Addresses:
    gateway = fleet.endpoint("gateway")
    return Addresses(
        http=gateway.address,
        gateway=gateway.second_address,
        verifier=fleet.endpoint("verifier").address,
        drafter=fleet.endpoint("drafter").address,
    )


async def _target(gateway: str) -> Target:
    async with grpc.aio.insecure_channel(gateway, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
        [model] = (await stub.ListModels(gateway_pb2.ListModelsRequest())).models
    return Target(vocab_hash=model.vocab_hash, vocab_size=model.vocab_size, context_len=model.context_len)


async def _good_text(fleet: LocalFleet) -> str:
    async with http_client() as client:
        done = await complete(client, fleet.gateway_url, GOOD)
    return f"refused: {done.error}" if done.error else done.text


async def _rest(fleet: LocalFleet) -> dict[str, int]:
    """Waits until the last sessions have ended; returns those that have not."""
    left = await sessions_left(fleet)
    for _ in range(REST_S):
        if not left:
            break
        await asyncio.sleep(1)
        left = await sessions_left(fleet)
    return left


def _growths(quarter: Mapping[str, float], end: Mapping[str, float]) -> dict[str, dict[str, float | bool]]:
    growths: dict[str, dict[str, float | bool]] = {}
    for name, first in quarter.items():
        limit = GROWTH_SHARE * first + GROWTH_MIB
        growth = end[name] - first
        growths[name] = {
            "quarter": round(first, 1),
            "end": round(end[name], 1),
            "growth": round(growth, 1),
            "limit": round(limit, 1),
            "ok": growth <= limit,
        }
    return growths


def _is_well(figures: Mapping[str, Any], count: int) -> bool:
    return (
        figures["messages"] >= count - len(SHARES)
        and not figures["wrong"]
        and figures["longest_stall_ms"] < 1e3 * MAX_STALL_S
        and not figures["sessions_left"]
        and figures["same_processes"]
        and figures["same_text"]
        and figures["without_keys"]["ok"]
        and all(row["ok"] for row in figures["memory_mib"].values())
    )


def _print_table(tally: Tally, figures: Mapping[str, Any]) -> None:
    rate = f"{figures['messages']} bad messages in {figures['seconds']} s, {figures['messages_per_s']} a second"
    print(f"{machine()}; {rate}\n")
    print(f"{'door':10}{'kind':26}answers")
    for (door, kind), counts in sorted(tally.counts.items()):
        print(f"{door:10}{kind:26}" + ", ".join(f"{status} {count}" for status, count in counts.most_common()))
    print(f"\n{'MiB':12}{'quarter':>9}{'end':>9}{'growth':>9}{'limit':>9}")
    for name, row in figures["memory_mib"].items():
        print(f"{name:12}" + "".join(f"{row[key]:9}" for key in ("quarter", "end", "growth", "limit")))
    print(f"\nlongest stall of the gateway's event loop: {figures['longest_stall_ms']} ms")
    print(f"wrong answers: {figures['wrong'] or 'none'}; sessions left over: {figures['sessions_left'] or 'none'};")
    print(f"the same processes: {figures['same_processes']}; the same text before and after: {figures['same_text']}\n")
    keyless = figures["without_keys"]
    print(f"{keyless['callers']} callers without a key for {keyless['seconds']:g} s: {keyless['answers']}")
    print(f"gateway, MiB before and at most: {keyless['memory_mib']}; health answers: {keyless['health']}")
    print(f"longest stall of its event loop, ms before and during: {keyless['longest_stall_ms']}")
    print(f"longest gap of a stream, ms before and during: {keyless['longest_gap_ms']}; {keyless['streams']} streams\n")
