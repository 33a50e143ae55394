"""Two or more source trees, or settings, by turns: `python -m loadtest turns . ../before`.

Each side is a folder with this project's sources (a git worktree of another commit, after `make protos` in it), and
flags of `paceline up` if there are any; `--drafter-arg=--draft-width=8` reaches the drafter. Every side is a whole
fleet, started by the launcher of its own tree, and all of them stay up, so that a slow minute of the machine meets all.
Every round decodes the same prompts with each side, every other one in the opposite order. Rounds go on until the
ratios to the first side are known to one percent or there were --most-rounds.

Before anything is measured, the bench checks which sources the services run, and ends if a fleet was not started from
its own tree. Two fleets of the same code differ by up to a tenth in tokens/s (name a side twice to see by how much
here): steps for the same text say more than speed. In the table:

* tokens_per_s: decoding only at one stream, all output over the whole time at more; ratio: over the first side's of the
  same round, median; error: its standard error
* steps: of all texts of a round; drafted: those among them that verified guesses; gamma: draft tokens of these;
  length: 1 + accepted / these; step_ms: of the verifier, prompts included

The bench is met when all sides give the same texts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from loadtest.bench import add_round_flags, bench_parser, report, run, show
from loadtest.client import BatchResult, asks_of, joined, run_batch, same_texts
from loadtest.streams import Ask
from loadtest.trial import Trial, rounded_error, take_turns
from tools.delay_proxy import DelayProxy
from tools.ports import free_port
from tools.procfs import children_of, environment_of
from tools.scrape import mean_between, scrape

HOST = "127.0.0.1"
# Tokens decoded untimed after each change: the verifier has to learn how long answers take now.
SETTLE_TOKENS = 96
# The first fleet of a tree compiles its kernels.
START_TIMEOUT_S, STOP_TIMEOUT_S, POLL_S = 300.0, 30.0, 0.5
PORTS = (
    "gateway-port", "gateway-grpc-port", "verifier-port", "verifier-metrics-port", "drafter-port",
    "drafter-metrics-port", "redis-port",
)  # fmt: skip


@dataclass(slots=True)
class Side:
    """A source tree, flags for its launcher, and where its fleet listens."""

    tree: Path
    flags: list[str]
    proxy: DelayProxy
    ports: dict[str, int]

    @property
    def url(self) -> str:
        """Its gateway."""
        return f"http://{HOST}:{self.ports['gateway-port']}"

    @property
    def title(self) -> str:
        """Name in the table."""
        return " ".join((self.tree.name, *self.flags))


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Results of a turn, and the verifier's metrics around it."""

    result: BatchResult
    tokens_per_s: float
    scrapes: tuple[Mapping[str, float], Mapping[str, float]]


# Turns by round trip (ms) and number of the side, one a round.
Turns = Mapping[tuple[float, int], Sequence[Turn]]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("turns", __doc__)
    parser.add_argument("sides", nargs="+", metavar="'TREE [FLAGS]'", help="at least two; ratios are to the first")
    parser.add_argument("--prompts", type=int, default=6, help="prompts a round (default 6)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt (default 128)")
    parser.add_argument("--streams", type=int, default=1, help="requests at a time (default 1)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    add_round_flags(parser, 3, 8)
    parser.add_argument(
        "--round-trips-ms", type=float, nargs="+", default=[0.0], help="between the tiers, injected (default 0)"
    )
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Starts all fleets, runs all rounds and prints the table; True when the texts are the same."""
    if len(arguments.sides) < 2:
        raise SystemExit("turns: at least two sides are needed, such as '. ../before'")
    asks = asks_of(arguments.prompts, arguments.max_tokens, arguments.temperature)
    trips = list(dict.fromkeys(arguments.round_trips_ms))
    async with AsyncExitStack() as stack:
        sides = [await stack.enter_async_context(_fleet(side)) for side in arguments.sides]
        for side in sides:
            await run_batch(side.url, [replace(ask, max_tokens=1) for ask in asks], 1, "prompts")
        turns = await take_turns(
            [(trip, index) for trip in trips for index in range(len(sides))],
            lambda at: _turn(sides[at[1]], at[0], asks, arguments.streams),
            rounds=arguments.rounds,
            most_rounds=arguments.most_rounds,
            is_known=lambda turns: all(_trial(turns, at).is_known() for at in turns if at[1]),
            title="sides",
        )
    rows = [
        {"side": side.title, "round_trip_ms": trip, **_row(turns, (trip, index))}
        for index, side in enumerate(sides)
        for trip in trips
    ]
    same = same_texts(turn.result for each in turns.values() for turn in each)
    show(rows)
    print("all texts equal" if same else "TEXTS DIFFER")
    return report("turns", batch_size=arguments.streams, rows=rows, ok=same)


async def _turn(side: Side, trip_ms: float, asks: Sequence[Ask], streams: int) -> Turn:
    """Lets the fleet settle, then times the requests."""
    side.proxy.set_round_trip(trip_ms / 1e3)
    title, metrics = f"{trip_ms:g} ms, {side.title}", f"{HOST}:{side.ports['verifier-metrics-port']}"
    await run_batch(side.url, [replace(asks[0], max_tokens=SETTLE_TOKENS)], 1, f"{title}, settling")
    before = await scrape(metrics)
    result = await run_batch(side.url, asks, streams, title)
    speed = result.decode_tokens_per_s if streams == 1 else result.tokens_per_s
    return Turn(result=result, tokens_per_s=speed, scrapes=(before, await scrape(metrics)))


def _trial(turns: Turns, at: tuple[float, int]) -> Trial:
    """A side over the first one at the same round trip."""
    mine, first = ([turn.tokens_per_s for turn in turns[at[0], index]] for index in (at[1], 0))
    return Trial.of(mine, first)


def _row(turns: Turns, at: tuple[float, int]) -> dict[str, Any]:
    done, trial = joined(turn.result for turn in turns[at]), _trial(turns, at)
    rounds = len(trial.ratios)
    step_s = mean_between("paceline:step_seconds", [turn.scrapes for turn in turns[at]])
    return {
        "tokens_per_s": round(statistics.median(turn.tokens_per_s for turn in turns[at]), 1),
        "ratio": round(trial.ratio, 3),
        "error": rounded_error(trial),
        "steps": round(done.total("num_steps") / rounds, 1),
        "drafted": round(done.total("num_spec_steps") / rounds, 1),
        "gamma": round(done.mean_gamma, 2),
        "length": round(done.mean_acceptance_length, 2),
        "step_ms": round(1e3 * step_s, 2),
        "rounds": rounds,
    }


def _parse(side: str) -> tuple[Path, list[str]]:
    """The tree and the flags that a side names.

    Raises:
        SystemExit: It is no source tree.
    """
    tree, *flags = shlex.split(side) or [""]
    root = Path(tree).resolve()
    if not tree or not (root / "services" / "paceline" / "rpc").is_dir():
        raise SystemExit(
            f"{tree!r} has no services/paceline/rpc: name a tree of this project, after `make protos` in it"
        )
    return root, flags


@asynccontextmanager
async def _fleet(side: str) -> AsyncIterator[Side]:
    """Starts what a side names, and stops it.

    Raises:
        SystemExit: It is no source tree, does not start, or runs other sources than its own.
    """
    root, flags = _parse(side)
    ports = {name: free_port(HOST) for name in PORTS}
    with DelayProxy((HOST, ports["drafter-port"])) as proxy, tempfile.TemporaryFile() as log:
        started = Side(root, flags, proxy, ports)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paceline", "up", "--no-lend", f"--drafter-arg=--announce={proxy.address}"),
            *(f"--{name}={port}" for name, port in ports.items()),
            *flags,
            env={**os.environ, "PYTHONPATH": str(root / "services")},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            await _until_healthy(process, started.url)
            _check_sources(process.pid, root)
            yield started
        except _NotStartedError as error:
            log.seek(0)
            raise SystemExit(f"{side}: {error}\n{log.read().decode(errors='replace')[-2000:]}") from error
        finally:
            await _stop(process)


class _NotStartedError(Exception):
    """A fleet is not there, or is not the one that was asked for."""


async def _until_healthy(process: asyncio.subprocess.Process, url: str) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient(trust_env=False) as client:
        while time.monotonic() < give_up_s:
            if process.returncode is not None:
                raise _NotStartedError(f"its launcher ended with status {process.returncode}")
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{url}/health")).is_success:
                    return
            await asyncio.sleep(POLL_S)
    raise _NotStartedError(f"not healthy within {START_TIMEOUT_S:g} s")


def _check_sources(launcher: int, root: Path) -> None:
    """Services must import the sources of their own tree, and not those that this bench runs from."""
    wanted = str(root / "services")
    services = [pid for pid in children_of(launcher) if "PYTHONPATH" in environment_of(pid)]
    if not services:
        raise _NotStartedError("its launcher has no services")
    for pid in services:
        first = environment_of(pid)["PYTHONPATH"].split(os.pathsep)[0]
        if first != wanted:
            raise _NotStartedError(f"process {pid} imports from {first}, not from {wanted}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
