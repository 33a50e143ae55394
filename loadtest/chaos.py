"""Kills, freezes, drains and cuts off a whole fleet's processes while streams run, and compares every token.

    make chaos                                        60 s, 200 streams, a fault every 2 s, every second one a kill
    make chaos ARGS='--faults kill --seconds 120'     kills only
    make chaos ARGS='--seed 7 --streams 40'           another course of events, a smaller load

First the streams run undisturbed; then again, each as often as time allows, while faults happen to verifiers,
drafters, gateways and the store in turn. Clients are `paceline.resuming.ResumingClient`s: they know all gateways and
resume at another when one breaks off. Nothing may be lost, doubled or changed, and no request may fail. The same seed
gives the same faults. Printed are the faults, what became of the streams, and how long they paused around kills.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.faults import FAULTS, KILL, VALKEY, Disturbance, Fault, Site, planned
from loadtest.fleet import FREE_PORTS, machine
from loadtest.proxy import DelayProxy
from loadtest.steadfast import Damage, Request, Stream, damage, keep_running, mixed_requests, run_each
from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import Endpoint, FleetSpec
from paceline.cluster.supervisor import BackOff
from paceline.resuming import ResumingClient
from paceline.store.base import open_store

# Streams end this long after the last fault at the latest.
PATIENCE_S = 90.0
# A stream that paused less around a kill had nothing to do with it.
AFFECTED_S = 0.25
# Services restart soon: what is tested is losing them, not waiting for them.
BACK_OFF = BackOff(first_s=0.2, most_s=0.5)


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = argparse.ArgumentParser(
        prog="chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="time of faults (default 60)")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two faults (default 2)")
    parser.add_argument("--streams", type=int, default=200, help="streams side by side (default 200)")
    parser.add_argument("--max-tokens", type=int, default=160, help="tokens a stream (default 160)")
    parser.add_argument("--verifiers", type=int, default=3, help="verifiers, which take long to start (default 3)")
    parser.add_argument("--replicas", type=int, default=2, help="of drafters and of gateways (default 2)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="kinds (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the course of events (default 1)")
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of the streams, and what was done to the fleet."""

    streams: Sequence[Stream]
    damage: Damage
    faults: Sequence[Fault]
    num_resumed: int


async def measure(options: argparse.Namespace) -> bool:
    """Runs undisturbed and disturbed; True when nothing was lost, doubled, changed or failed."""
    return report(options, await run(options))


async def run(options: argparse.Namespace) -> Outcome:
    """Starts a fleet, runs the streams undisturbed and disturbed, and compares."""
    chance = random.Random(options.seed)
    requests = mixed_requests(options.streams, options.max_tokens)
    async with disturbed_fleet(options.replicas, num_verifiers=options.verifiers) as site:
        gateways = [endpoint.second_address for endpoint in site.fleet.endpoints_of("gateway")]
        # A stream that waits for its turn is silent; gateways that are frozen are found out by the pings of gRPC.
        async with ResumingClient(gateways, patience_s=PATIENCE_S, silence_s=PATIENCE_S) as client:
            reference = await _undisturbed(client, requests)
            plan = planned(options.faults, _names(site.fleet), chance)
            disturbance = Disturbance(site, plan, chance)
            streams = await _disturbed(client, requests, disturbance, options)
            return Outcome(
                streams=streams,
                damage=damage(streams, reference),
                faults=disturbance.done,
                num_resumed=client.num_resumed,
            )


@asynccontextmanager
async def disturbed_fleet(num_replicas: int, **settings: Any) -> AsyncIterator[Site]:
    """A fleet of the demo pair, verifiers and drafters behind proxies; the disk of the first ones is full of logs."""
    proxies: dict[str, DelayProxy] = {}
    with ExitStack() as open_proxies, tempfile.TemporaryDirectory() as folder:

        def through_a_proxy(endpoint: Endpoint) -> str:
            proxy = open_proxies.enter_context(DelayProxy((endpoint.host, endpoint.port)))
            proxies[endpoint.name] = proxy
            return proxy.address

        for role in ("verifier", "drafter", "gateway"):
            (Path(folder) / f"{role}-0.log").symlink_to("/dev/full")
        fleet = LocalFleet(
            _spec(num_replicas, Path(folder), settings),
            environ=os.environ,
            back_off=BACK_OFF,
            announce=through_a_proxy,
        )
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(fleet)
            store = await opened.enter_async_context(open_store(fleet.redis_url))
            yield Site(fleet=fleet, store=store, proxies=proxies)


def _spec(num_replicas: int, log_dir: Path, settings: dict[str, Any]) -> FleetSpec:
    defaults: dict[str, Any] = {
        "model": DEMO_TARGET,
        "draft_model": DEMO_DRAFTER,
        # The same arithmetic on every machine, and the quickest where bfloat16 is emulated.
        "dtype": "float32",
        "num_gateways": num_replicas,
        "num_verifiers": num_replicas,
        "num_drafters": num_replicas,
        # One that is left carries all.
        "verifier_arg": ("--max-num-seqs=256", "--num-kv-blocks=4000"),
        "log_dir": log_dir,
        "grace_s": 5.0,
    }
    return FleetSpec(**{**FREE_PORTS, **defaults, **settings})


def _names(fleet: LocalFleet) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {"verifier": [], "gateway": [], "drafter": [], VALKEY: []}
    for endpoint in fleet.endpoints:
        names[endpoint.role].append(endpoint.name)
    return names


async def _undisturbed(client: ResumingClient, requests: Sequence[Request]) -> list[list[int]]:
    with tqdm(total=len(requests), desc="undisturbed", unit="stream") as bar:
        streams = await run_each(client, requests, bar.update)
    failed = [stream.error for stream in streams if stream.error]
    if failed:
        raise RuntimeError(f"{len(failed)} undisturbed streams failed, first: {failed[0]}")
    return [stream.token_ids for stream in streams]


async def _disturbed(
    client: ResumingClient, requests: Sequence[Request], disturbance: Disturbance, options: argparse.Namespace
) -> list[Stream]:
    faults = asyncio.Event()
    with tqdm(desc="disturbed", unit="stream") as bar:

        async def disturb() -> None:
            try:
                await disturbance.go_on(options.every, options.seconds, lambda it: bar.set_postfix_str(_words(it)))
            finally:
                faults.set()

        disturbing = asyncio.create_task(disturb())
        streams = await keep_running(client, requests, faults.is_set, lambda _: bar.update())
        await disturbing
    return streams


def _words(fault: Fault) -> str:
    return f"{fault.kind} {fault.name}"


def report(options: argparse.Namespace, outcome: Outcome) -> bool:
    """Prints what happened and the figures; True when there was no damage."""
    streams, faults, found = outcome.streams, outcome.faults, outcome.damage
    counts = Counter((fault.kind, fault.role) for fault in faults)
    sys.stdout.write(f"{len(faults)} faults in {options.seconds:g} s:\n")
    for (kind, role), count in sorted(counts.items()):
        sys.stdout.write(f"  {kind:10} {role:9} {count:3}\n")
    pauses = {role: _pauses(streams, faults, role) for role in ("verifier", "gateway", "drafter", VALKEY)}
    sys.stdout.write(f"pauses of streams around kills, where above {AFFECTED_S:g} s (p50, p99, streams):\n")
    for role, values in pauses.items():
        if values:
            p50, p99 = statistics.median(values), _percentile(values, 0.99)
            sys.stdout.write(f"  {role:9} {p50:6.2f} s {p99:6.2f} s {len(values):5}\n")
        else:
            sys.stdout.write(f"  {role:9} none\n")
    for error, count in Counter(stream.error for stream in streams if stream.error).most_common(5):
        sys.stdout.write(f"failed {count} times: {error}\n")
    every = sorted(value for values in pauses.values() for value in values)
    figures = {
        "bench": "chaos",
        "machine": machine(),
        "seed": options.seed,
        "batch_size": options.streams,
        "seconds": options.seconds,
        "faults": len(faults),
        "kills": sum(fault.kind == KILL for fault in faults),
        "streams": len(streams),
        "tokens": sum(len(stream.token_ids) for stream in streams),
        "resumed": outcome.num_resumed,
        **{name.removeprefix("num_"): value for name, value in asdict(found).items()},
        "recovery_p50_s": round(statistics.median(every), 3) if every else 0.0,
        "recovery_p99_s": round(_percentile(every, 0.99), 3) if every else 0.0,
        "ok": found.none,
    }
    print(json.dumps(figures))
    return found.none


def _pauses(streams: Sequence[Stream], faults: Sequence[Fault], role: str) -> list[float]:
    kills = [fault.at_s for fault in faults if fault.kind == KILL and fault.role == role]
    found = (stream.pause_after(at_s) for at_s in kills for stream in streams)
    return [pause for pause in found if pause is not None and pause >= AFFECTED_S]


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
