"""Replays a trace of arrivals against the fleet, open loop, and reports every latency: `make load`.

Requests are sent when the trace says, whether earlier ones have ended or not. Times are those of tokens as they come:
tokens that come at once share their wait. With `--speculation all`, windows of the replay are run with speculation
off, on (a fixed number of draft tokens) and adaptive in turn, each on a fleet of its own that is idle otherwise, and
compared: same arrivals, same prompts, same seeds, so the same texts.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.bench import machine, report
from loadtest.client import replay
from loadtest.fleet import bench_fleet, say
from loadtest.prompts import Prompts, open_prompts
from loadtest.streams import COUNTED, Ask, Door, GrpcDoor, HttpDoor
from loadtest.traffic.config import HTTP, OFF, ON, TRACE, LoadConfig
from loadtest.traffic.figures import Window, bucket_figures, buckets_of, comparison, different_texts, mode_figures
from loadtest.traffic.plan import Source, requests_of, windows_of
from loadtest.traffic.report import print_tables
from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.core.errors import PacelineError
from paceline.service.config import exit_with_error, parse

PROG = "load"
WARM_RATE_SHARE = 0.5
# Nobody is refused: a replay measures how long requests take, not how many are turned away.
UNBOUNDED = ("--max-sessions=100000", "--max-wait-s=86400")


def main() -> None:
    """Parses the command line and runs the replay; exit status 1 if what it must show does not hold."""
    try:
        config = parse(LoadConfig, sys.argv[1:], os.environ, PROG, str(__doc__))
        figures = asyncio.run(measure(config))
    except PacelineError as error:
        exit_with_error(PROG, error)
    print_tables(figures)
    ok = report("load", figures=str(figures_file(config)), checks=figures["checks"], ok=figures["ok"])
    raise SystemExit(0 if ok else 1)


async def measure(config: LoadConfig) -> dict[str, Any]:
    """Runs the replay and returns all figures; they are written whenever each mode has had another window.

    Raises:
        PacelineError: The trace, the prompts or the fleets make it impossible.
    """
    source = Source(config)
    prompts, described = open_prompts(
        config.prompts, config.model or DEMO_TARGET, max_tokens=config.max_prompt_tokens, seed=config.seed
    )
    figures: dict[str, Any] = {}
    rate = source.trace_rate_per_s if config.rate == TRACE else float(config.rate)
    async with _doors(config) as doors:
        plan = {**source.described(rate), "prompts": described}
        windows = windows_of(requests_of(source.arrivals(rate), prompts, config), config.duration_s, config.window_s)
        await _warm_up(config, source, prompts, doors, rate)
        async for runs in run_windows(doors, windows):
            done = windows[: len(runs[config.modes[0]])]
            figures = figures_of(config, plan, runs, done)
            config.out.parent.mkdir(parents=True, exist_ok=True)
            figures_file(config).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return figures


def figures_file(config: LoadConfig) -> Path:
    """Returns where the figures go."""
    return config.out.with_name(f"{config.out.name}.json")


@asynccontextmanager
async def _doors(config: LoadConfig) -> AsyncIterator[Mapping[str, Door]]:
    """Starts a fleet for each mode, or takes the gateway that is named, and yields the mode's door."""
    async with AsyncExitStack() as stack:
        doors = {}
        for mode in config.modes:
            address = config.url
            if not address:
                fleet = await stack.enter_async_context(bench_fleet(**settings_of(config, mode)))
                address = fleet.gateway_url if config.door == HTTP else fleet.endpoint("gateway").second_address
            doors[mode] = open_door(config.door, address)
            stack.push_async_callback(doors[mode].close)
        yield doors


def settings_of(config: LoadConfig, mode: str) -> dict[str, Any]:
    """Returns the `FleetSpec` settings of a mode's fleet; fleets are alike but for what the mode is about."""
    settings: dict[str, Any] = {name: getattr(config, name) for name in ("dtype", "lend", "model", "draft_model")}
    settings |= {"gateway_arg": UNBOUNDED, "verifier_arg": ("--max-queue=100000",)}
    if mode == ON:
        settings["speculative_config"] = json.dumps({"policy": "fixed", "num_speculative_tokens": config.gamma})
    return settings


def open_door(kind: str, address: str) -> Door:
    """Returns a door: of a URL for HTTP, of host and port for gRPC."""
    return HttpDoor(address, more=COUNTED) if kind == HTTP else GrpcDoor(address)


def asked_in(mode: str, requests: Sequence[Ask]) -> list[Ask]:
    """Returns requests as a mode sends them."""
    return [replace(each, speculation={"enabled": False} if mode == OFF else None) for each in requests]


async def _warm_up(
    config: LoadConfig, source: Source, prompts: Prompts, doors: Mapping[str, Door], rate: float
) -> None:
    """Lets each fleet serve for a while, so that it knows its step times."""
    if not config.warmup_s:
        return
    warm = replace(config, seed=config.seed + 1_000)
    arrivals = [each for each in source.arrivals(rate * WARM_RATE_SHARE) if each.at_s < config.warmup_s]
    for mode, door in doors.items():
        say(f"warming up: {mode}")
        await replay(door, asked_in(mode, requests_of(arrivals, prompts, warm)))


async def run_windows(
    doors: Mapping[str, Door], windows: Sequence[Sequence[Ask]]
) -> AsyncIterator[Mapping[str, Sequence[Window]]]:
    """Runs every window in every mode, one after another, in an order that turns with the windows.

    Yields:
        All answers so far, whenever every mode has run a window more.
    """
    modes = list(doors)
    runs: dict[str, list[Window]] = {mode: [] for mode in modes}
    with tqdm(total=len(modes) * sum(map(len, windows)), unit="request", mininterval=1.0) as bar:
        for number, window in enumerate(windows):
            first = number % len(modes)
            for mode in modes[first:] + modes[:first]:
                bar.set_description(f"{mode}, window {number + 1} of {len(windows)}")
                runs[mode].append(await replay(doors[mode], asked_in(mode, window), lambda _: bar.update()))
            yield runs


def figures_of(
    config: LoadConfig,
    plan: Mapping[str, Any],
    runs: Mapping[str, Sequence[Window]],
    windows: Sequence[Sequence[Ask]],
) -> dict[str, Any]:
    """Returns all figures of a replay; `checks` is what must hold."""
    buckets = buckets_of(windows, config.slot_s)
    modes = {mode: mode_figures(of) for mode, of in runs.items()}
    compared = comparison(runs, buckets, config.seed)
    num_different = different_texts(runs)
    checks = {
        "no_errors": not any(figures["errors"] for figures in modes.values()),
        "same_texts": not num_different,
    }
    if "ok" in compared:
        checks["adaptive_best_or_within_limit"] = compared["ok"]
    return {
        "bench": "load",
        "machine": machine(),
        "dtype": config.dtype,
        "door": config.door,
        "replay": dict(plan),
        "windows": len(windows),
        "modes": modes,
        "buckets": bucket_figures(runs, buckets),
        "comparison": compared,
        "different_texts": num_different,
        "checks": checks,
        "ok": all(checks.values()),
    }
