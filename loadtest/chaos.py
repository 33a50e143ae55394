"""Does to a whole fleet all that can go wrong while streams run, and judges what every client sent and got.

    make chaos                                        every kind of fault, 24 streams over both doors
    make chaos ARGS='--faults kill --seconds 60'      kills only
    make chaos ARGS='--seed 7 --streams 16'           another course of events, a smaller load

First the streams run undisturbed; then again, each as often as time allows, while faults happen to verifiers,
drafters, gateways and the store in turn. There are more streams than places: some clients are refused and come again.
They are `ResumingClient`s, over gRPC and over HTTP, know all gateways, and go on at another one when a stream breaks
off. Some prompts fill the model's whole context. Nothing may be lost, doubled or changed, each request that was taken
gets its answer, a poisonous request is refused before it has ended a third engine, and a key that is withdrawn in a
change that breaks the file of keys is gone, while that of the streams stays. The same seed gives the same faults.
With --targets 2 every other verifier has another target, half of the streams ask for it, and all share the drafters.
Printed are the faults, what became of the streams, and how long they paused around kills.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import resource
import statistics
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from loadtest.alternating import environ_of
from loadtest.bench import bench_parser, report, run, show
from loadtest.faults import FAULTS, KEY_FILE, KILL, POISONER, VALKEY, Disturbance, Fault, Poisoned, Site, planned
from loadtest.faulty.orders import FOLDER_VARIABLE
from loadtest.fleet import DEMO_PAIR, bench_fleet
from loadtest.histories import History, Kind, Verdict, judge, judge_one
from loadtest.key_faults import KeyFile, Withdrawn
from loadtest.resuming_http import ResumingHttpClient
from loadtest.steadfast import Answer, Request, keep_running, long_request, mixed_requests, over, run_each
from loadtest.store_faults import UNWRITABLE_S
from paceline.client.resuming import ResumingClient
from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import ServicePort
from paceline.service.supervision import BackOff
from paceline.store.redis import open_store
from tools.delay_proxy import DelayProxy

# Longest time without a token: on two cores a verifier takes 10 to 20 s to start, and contexts are computed anew.
PATIENCE_S = 120.0
# Nobody pings over HTTP: a gateway that is silent for longer is taken for gone.
SILENCE_S = 60.0
# A stream that paused less around a kill had nothing to do with it.
AFFECTED_S = 0.25
# Services restart soon: the test is of losing them, not of waiting for them.
BACK_OFF = BackOff(first_s=0.2, most_s=0.5)
# Places of all gateways together, per stream.
PLACES_A_STREAM = 0.8
# Longest time until each kind of fault has happened.
MOST_S = 240.0
# A stream of that many has a prompt that fills the context.
STREAMS_A_LONG_ONE = 12
CONTEXT_LEN = 2048
# An engine that makes no step for that long is taken for hung.
ENGINE_STALL_S = 3.0
FAULTY = {role: f"loadtest.faulty.{role}" for role in ("verifier", "drafter", "gateway")}


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("chaos", __doc__)
    parser.add_argument("--seconds", type=float, help="time of faults (default: until each kind has happened once)")
    parser.add_argument("--every", type=float, default=2.5, help="seconds between two faults (default 2.5)")
    parser.add_argument("--streams", type=int, default=24, help="streams side by side (default 24)")
    parser.add_argument("--max-tokens", type=int, default=160, help="tokens a stream (default 160)")
    parser.add_argument("--verifiers", type=int, default=3, help="verifiers, which take long to start (default 3)")
    parser.add_argument("--targets", type=int, choices=(1, 2), default=1, help="models of the verifiers (default 1)")
    parser.add_argument("--replicas", type=int, default=2, help="of drafters and of gateways (default 2)")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="kinds (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="of the course of events (default 1)")
    parser.add_argument("--logs", type=Path, help="folder for the services' logs (default: a temporary one)")
    run(parser, measure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcomes of the streams, and faults done to the fleet."""

    histories: Sequence[History]
    reference: Sequence[History]
    verdict: Verdict
    poisoned: Sequence[Poisoned]
    withdrawn: Sequence[Withdrawn]
    faults: Sequence[Fault]
    num_resumed: int

    @property
    def ok(self) -> bool:
        """Whether nothing came to harm."""
        withdrawn = not any(each.num_left for each in self.withdrawn)
        return self.verdict.clean and withdrawn and all(each.contained for each in self.poisoned)


async def measure(options: argparse.Namespace) -> bool:
    """Runs undisturbed and disturbed; True when nothing was lost, doubled, changed or left without an answer."""
    return print_report(options, await disturb(options))


async def disturb(options: argparse.Namespace) -> Outcome:
    """Starts a fleet, runs the streams undisturbed and disturbed, and compares."""
    chance = random.Random(options.seed)
    requests = mixed_requests(options.streams, options.max_tokens)
    for index in range(STREAMS_A_LONG_ONE - 1, options.streams, STREAMS_A_LONG_ONE):
        requests[index] = long_request(index, options.max_tokens, CONTEXT_LEN)
    places = max(1, math.ceil(PLACES_A_STREAM * options.streams / options.replicas))
    gateway_arg, environ = [f"--max-sessions={places}"], dict[str, str]()
    if options.targets == 2:
        # The draft model as a target: smaller, with other texts.
        gateway_arg.append(f"--model={DEMO_DRAFTER}")
        environ = environ_of({"--model": DEMO_DRAFTER})
        for index, request in enumerate(requests):
            # Pairs of requests, as one of each pair is sampled.
            request.model = (DEMO_TARGET if index // 2 % 2 else DEMO_DRAFTER).name
    settings: dict[str, Any] = {"num_verifiers": options.verifiers, "gateway_arg": gateway_arg, "environ": environ}
    async with (
        disturbed_fleet(options.replicas, chance, options.logs, **settings) as site,
        _clients(site.fleet, site.keys.stays) as clients,
    ):
        answers = [over(client) for client in clients]
        reference = await run_each(answers[0], requests)
        plan = planned(options.faults, _names(site.fleet), chance, num_rounds=None if options.seconds else 1)
        disturbance = Disturbance(site, plan)
        histories = await _disturbed(answers, requests, disturbance, options)
        return Outcome(
            histories=histories,
            reference=reference,
            verdict=judge(histories, reference),
            poisoned=site.poisoned,
            withdrawn=site.withdrawn,
            faults=disturbance.done,
            num_resumed=sum(client.num_resumed for client in clients),
        )


@asynccontextmanager
async def _clients(fleet: LocalFleet, api_key: str) -> AsyncIterator[tuple[ResumingClient, ResumingClient]]:
    """Yields a client for each door."""
    gateways = fleet.endpoints_of("gateway")
    # A stream that waits for its turn is silent; the pings of gRPC find gateways that are frozen.
    grpc_client = ResumingClient(
        [each.second_address for each in gateways], api_key=api_key, patience_s=PATIENCE_S, silence_s=PATIENCE_S
    )
    http_client = ResumingHttpClient(
        [f"http://{each.address}" for each in gateways],
        api_key=api_key,
        patience_s=PATIENCE_S,
        silence_s=SILENCE_S,
    )
    async with grpc_client, http_client:
        yield grpc_client, http_client


@asynccontextmanager
async def disturbed_fleet(
    num_replicas: int, chance: random.Random, logs: Path | None = None, **settings: Any
) -> AsyncIterator[Site]:
    """A fleet of the demo pair that can go wrong, all but gateways behind proxies.

    Args:
        num_replicas: Replicas of each tier.
        chance: For its faults.
        logs: Folder for logs; None: a temporary one, where the disk of the first of each tier is full of them.
        settings: Other fields of `FleetSpec`.
    """
    proxies: dict[str, DelayProxy] = {}
    # Crowds of connections take as many files as the system grants.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    with ExitStack() as open_proxies, tempfile.TemporaryDirectory() as folder:

        def through_a_proxy(endpoint: ServicePort) -> str:
            proxy = open_proxies.enter_context(DelayProxy((endpoint.host, endpoint.port)))
            proxies[endpoint.name] = proxy
            return proxy.address

        for role in FAULTY if logs is None else ():
            (Path(folder) / f"{role}-0.log").symlink_to("/dev/full")
        keys = KeyFile(Path(folder) / "keys")
        gateway_arg = (*settings.pop("gateway_arg", ()), f"--api-keys-file={keys.path}")
        fleet = bench_fleet(
            environ={FOLDER_VARIABLE: folder, **settings.pop("environ", {})},
            launcher={"back_off": BACK_OFF, "announce": through_a_proxy, "modules": FAULTY},
            gateway_arg=gateway_arg,
            **{**_defaults(num_replicas, Path(folder) if logs is None else logs), **settings},
        )
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(fleet)
            store = await opened.enter_async_context(open_store(fleet.redis_url))
            yield Site(fleet=fleet, store=store, proxies=proxies, keys=keys, orders=Path(folder), chance=chance)


def _defaults(num_replicas: int, log_dir: Path) -> dict[str, Any]:
    return {
        **DEMO_PAIR,
        # The same arithmetic on every machine, and the quickest where bfloat16 is emulated.
        "dtype": "float32",
        "num_gateways": num_replicas,
        "num_verifiers": num_replicas,
        "num_drafters": num_replicas,
        # The last replica carries all.
        "verifier_arg": ("--max-num-seqs=256", "--num-kv-blocks=4000", f"--engine-stall-s={ENGINE_STALL_S:g}"),
        "log_dir": log_dir,
        "grace_s": 5.0,
    }


def _names(fleet: LocalFleet) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {
        "verifier": [],
        "gateway": [],
        "drafter": [],
        VALKEY: [],
        POISONER: [POISONER],
        KEY_FILE: [KEY_FILE],
    }
    for endpoint in fleet.endpoints:
        names[endpoint.role].append(endpoint.name)
    return names


async def _disturbed(
    answers: Sequence[Answer], requests: Sequence[Request], disturbance: Disturbance, options: argparse.Namespace
) -> list[History]:
    with tqdm(desc="disturbed", unit="stream") as bar:

        def on_fault(fault: Fault) -> None:
            bar.set_postfix_str(f"{fault.kind} {fault.name}")

        seconds = options.seconds or MOST_S
        disturbing = asyncio.create_task(disturbance.go_on(options.every, seconds, on_fault))
        histories = await keep_running(answers, requests, disturbing.done, lambda _: bar.update())
        await disturbing
    return histories


def print_report(options: argparse.Namespace, outcome: Outcome) -> bool:
    """Prints what happened and the figures; True when there was no harm."""
    histories, faults = outcome.histories, outcome.faults
    counts = Counter((fault.kind, fault.role) for fault in faults)
    show({"fault": kind, "tier": role, "times": count} for (kind, role), count in sorted(counts.items()))
    pauses = {role: _pauses(histories, faults, role) for role in ("verifier", "gateway", "drafter", VALKEY)}
    print(f"pauses of streams around kills, where above {AFFECTED_S:g} s:")
    show({"tier": role, "streams": len(each), **_quantiles(each, "pause")} for role, each in pauses.items())
    for each in outcome.poisoned:
        last = each.history.events[-1]
        print(f"poisonous ({each.kind}): ended {each.num_engines} engines; {last.kind}: {last.why}")
    for key in outcome.withdrawn:
        times = ", ".join(f"{gone_s:.1f} s" for gone_s in key.gone_s)
        print(f"withdrawn key: gone after {times} at the gateways; {key.num_left} still took it")
    for history in histories:
        accuse(history, outcome.reference[history.index], faults)
    return report(
        "chaos",
        seed=options.seed,
        batch_size=options.streams,
        seconds=round(faults[-1].at_s - faults[0].at_s if faults else 0.0),
        faults=len(faults),
        kinds=len({fault.kind for fault in faults}),
        kills=sum(fault.kind == KILL for fault in faults),
        streams=len(histories),
        doors=dict(Counter(history.door for history in histories)),
        tokens=sum(len(history.token_ids) for history in histories),
        characters=sum(len(history.text) for history in histories),
        resumed=outcome.num_resumed,
        refused=sum(event.kind is Kind.REFUSED for history in histories for event in history.events),
        **asdict(outcome.verdict),
        poisonous=[each.num_engines for each in outcome.poisoned],
        poison_contained=all(each.contained for each in outcome.poisoned),
        withdrawn_keys=len(outcome.withdrawn),
        withdrawn_keys_left=sum(each.num_left for each in outcome.withdrawn),
        **_quantiles([pause for each in pauses.values() for pause in each], "recovery"),
        ok=outcome.ok,
    )


def _quantiles(values: Sequence[float], name: str) -> dict[str, float]:
    return {
        f"{name}_p50_s": round(statistics.median(values), 3) if values else 0.0,
        f"{name}_p99_s": round(float(np.quantile(values, 0.99)), 3) if values else 0.0,
    }


def accuse(history: History, wanted: History, faults: Sequence[Fault]) -> None:
    """Prints a history with which something is wrong, and what was done to the fleet meanwhile."""
    verdict = judge_one(history, wanted)
    if verdict.clean:
        return
    begin_s, end_s = history.events[0].at_s, history.events[-1].at_s
    wrong = {name: count for name, count in asdict(verdict).items() if count}
    print(f"guilty: request {history.index} over {history.door}, {wrong}")
    num_tokens = num_chars = 0
    for event in history.events:
        num_tokens += len(event.token_ids)
        num_chars += len(event.text)
        if event.kind is not Kind.PIECE:
            have = f"{num_tokens} tokens, {num_chars} characters"
            print(f"  {event.at_s - begin_s:7.3f} s {event.kind:8} with {have}: {event.why[:200]}")
    print(f"  got    {history.text!r}\n  wanted {wanted.text!r}")
    for fault in faults:
        if begin_s - UNWRITABLE_S <= fault.at_s <= end_s:
            print(f"  {fault.at_s - begin_s:7.3f} s {fault.kind} {fault.name}")


def _pauses(histories: Sequence[History], faults: Sequence[Fault], role: str) -> list[float]:
    kills = [fault.at_s for fault in faults if fault.kind == KILL and fault.role == role]
    found = (history.pause_after(at_s) for at_s in kills for history in histories)
    return [pause for pause in found if pause is not None and pause >= AFFECTED_S]
