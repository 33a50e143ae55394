"""Gateway cost at 64 streams: HTTP and SSE against gRPC straight to the verifier. `make bench NAME=gateway`.

All streams go through the gateway or all straight to the verifier, by turns, speculation off. Judged are the tokens/s
of HTTP over those of gRPC, and that no stream falls behind: one more session, the witness, runs straight on the
verifier beside the 64, and as all sessions commit in the same steps, its tokens show when each step was done. The
growth of a stream's lag from a quarter of its tokens to its last, counted in the witness's steps, must stay below 2
steps for 99 % of the streams: a gateway that sends more slowly than the verifier commits is later with every token.

The verifier has the first CPU to itself; gateway and load generator share the others, as on hosts of their own. The
load generator is this process: it notes bytes and times while streams run and reads them afterwards. The CPU shares in
the table, of one core each, show who was busy; this process must stay well below a core.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.bench import bench_parser, report, run, show
from loadtest.fleet import bench_fleet
from loadtest.straight import StraightCalls
from loadtest.streams import Ask, Completion, HttpDoor
from loadtest.trial import Trial, rounded_error, take_turns
from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import available_cpus
from paceline.core.params import SpeculationParams
from paceline.gateway.text.codec import TextCodec
from tools.procfs import cpu_s, keep_to

LEAST_RATIO = 0.95
MOST_LAG_STEPS = 2.0
# Beyond it the generator, not the gateway, would be what is measured.
MOST_GENERATOR_SHARE = 0.7
WITNESS_TOKENS = 32
DIRECT, HTTP = WAYS = ("direct", "http")
GENERATOR = "load generator"


class Ways:
    """Both ways into one fleet: through its gateway, and straight to its verifier over one stream, as gateways do."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._verifier = StraightCalls(fleet.endpoint("verifier").address)
        self._gateway = HttpDoor(fleet.gateway_url)

    async def stream(self, way: str, ask: Ask) -> Completion:
        """Streams a session; a piece is a token.

        Raises:
            RuntimeError: The gateway refused it.
        """
        if way == DIRECT:
            return await self._straight(ask)
        done = await self._gateway.ask(ask)
        if done.error:
            raise RuntimeError(done.message)
        return done

    async def _straight(self, ask: Ask) -> Completion:
        started_s = time.perf_counter()
        arrived = await self._verifier.arrived(ask, SpeculationParams(enabled=False))
        pieces = [(at_s, 1) for at_s, token_ids in arrived for _ in token_ids]
        return Completion(started_s=started_s, ended_s=arrived[-1][0], pieces=pieces, num_tokens=len(pieces))

    async def close(self) -> None:
        """Ends the stream."""
        await self._verifier.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A run of one way with many streams at once.

    Attributes:
        totals_s: From the request to the end, by stream.
        lags: Growth of the lag in steps, by stream.
        cpu_shares: CPU time over wall time, by process.
    """

    tokens_per_s: float
    totals_s: Sequence[float]
    lags: Sequence[float]
    step_ms: float
    cpu_shares: Mapping[str, float]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("gateway", __doc__)
    parser.add_argument("--streams", type=int, default=64, help="streams at once (default 64)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a session (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="runs each way (default 5)")
    parser.add_argument("--model", choices=("demo", "widened"), default="widened", help="target (default widened)")
    run(parser, measure)


@asynccontextmanager
async def _fleet(model: Path | None, *verifier_arg: str) -> AsyncIterator[tuple[LocalFleet, Ways]]:
    """A fleet without drafters, each tier on CPUs of its own."""
    named: dict[str, Any] = {} if model is None else {"model": model, "draft_model": DEMO_DRAFTER}
    first, *others = available_cpus()
    # A message for each token, so that what one costs is seen.
    flags = (f"--cpus={first}", "--stream-interval-s=0", *verifier_arg)
    async with bench_fleet(drafter=False, verifier_threads=1, verifier_arg=flags, **named) as fleet:
        for pid in (fleet.pid("gateway"), os.getpid()) if others else ():
            keep_to(pid, others)
        ways = Ways(fleet)
        try:
            yield fleet, ways
        finally:
            await ways.close()
            keep_to(os.getpid(), [first, *others])


def _asks(fleet: LocalFleet, count: int, max_tokens: int) -> list[Ask]:
    assert fleet.checkpoints is not None, "the fleet runs"
    codec = TextCodec.from_folder(fleet.checkpoints.target)
    encoded = (
        codec.encode(text, field="prompt", special_tokens=True, context_len=2048) for text in unseen_prompts(count)
    )
    return [Ask(prompt=ids, max_tokens=max_tokens, speculation={"enabled": False}) for ids in encoded]


def _middle_and_end(values: Sequence[float], places: int) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), places),
        "p99": round(float(np.quantile(values, 0.99)), places),
    }


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs many streams both ways by turns and prints both; True when the gateway keeps up."""
    model = DEMO_TARGET if arguments.model == "demo" else None
    seats = arguments.streams + 1
    async with _fleet(model, f"--max-num-seqs={seats}") as (fleet, ways):
        *asks, last = _asks(fleet, seats, arguments.max_tokens)
        # The witness outlives the others by what it may have begun earlier.
        witness = replace(last, max_tokens=arguments.max_tokens + WITNESS_TOKENS)

        async def once(way: str) -> Load:
            return await _measure_load(fleet, ways, way, asks, witness)

        # Both ways then find the prompts in the prefix cache.
        await once(HTTP)
        loads = await take_turns(WAYS, once, rounds=arguments.rounds, title=f"{arguments.streams} streams")
        name = fleet.model_name
    return report("gateway", model=name, batch_size=arguments.streams, **_figures(loads))


async def _measure_load(fleet: LocalFleet, ways: Ways, way: str, asks: Sequence[Ask], witness: Ask) -> Load:
    pids = {GENERATOR: os.getpid(), "verifier": fleet.pid("verifier"), "gateway": fleet.pid("gateway")}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    started_s = time.perf_counter()
    seen, *streams = await asyncio.gather(ways.stream(DIRECT, witness), *(ways.stream(way, ask) for ask in asks))
    wall_s = time.perf_counter() - started_s
    cpu_shares = {name: (cpu_s(pid) - before[name]) / wall_s for name, pid in pids.items()}
    first_s, last_s = min(each.started_s for each in streams), max(each.ended_s for each in streams)
    step_s, steps_s = statistics.median(seen.gaps_s), [at_s for at_s, _ in seen.pieces]
    # A stream with a character made of several tokens has fewer pieces than steps and cannot be laid beside them.
    whole = [each for each, ask in zip(streams, asks, strict=True) if len(each.pieces) == ask.max_tokens]
    return Load(
        tokens_per_s=sum(ask.max_tokens for ask in asks) / (last_s - first_s),
        totals_s=[each.e2e_s for each in streams],
        lags=[lag_growth_s([at_s for at_s, _ in each.pieces], steps_s) / step_s for each in whole],
        step_ms=1e3 * step_s,
        cpu_shares=cpu_shares,
    )


def lag_growth_s(times_s: Sequence[float], steps_s: Sequence[float]) -> float:
    """How much later than the steps the last piece came, compared with the piece a quarter into the stream.

    Args:
        times_s: When a stream's pieces came, one a step.
        steps_s: When the witness's pieces came, one a step; the witness lives longer.
    """
    quarter = len(times_s) // 4
    pieces = len(times_s) - 1 - quarter
    begun = max(0, bisect.bisect_right(steps_s, times_s[quarter]) - 1)
    ended = min(begun + pieces, len(steps_s) - 1)
    return (times_s[-1] - times_s[quarter]) - (steps_s[ended] - steps_s[begun])


def _figures(loads: Mapping[str, Sequence[Load]]) -> dict[str, Any]:
    rows = {way: _load_row(runs) for way, runs in loads.items()}
    pairs = list(zip(loads[HTTP], loads[DIRECT], strict=True))
    behind_ms = [
        1e3 * (mine - its) for http, direct in pairs for mine, its in zip(http.totals_s, direct.totals_s, strict=True)
    ]
    trial = Trial(tuple(http.tokens_per_s / direct.tokens_per_s for http, direct in pairs))
    generator_ok = max(_share(runs, GENERATOR) for runs in loads.values()) <= MOST_GENERATOR_SHARE
    keeps_up = rows[HTTP]["lag_growth_steps_p99"] <= MOST_LAG_STEPS
    figures = {
        "ratio": round(trial.ratio, 4),
        "error": rounded_error(trial),
        "total_difference_ms": _middle_and_end(behind_ms, 1),
        # Its inverse is what one gateway process can carry.
        "gateway_cpu_ms_per_token": round(1e3 * _share(loads[HTTP], "gateway") / rows[HTTP]["tokens_per_s"], 4),
        "generator_ok": generator_ok,
        "ok": trial.meets(least=LEAST_RATIO) and keeps_up and generator_ok,
    }
    show({"way": way, **row} for way, row in rows.items())
    show([figures])
    return {**rows, **figures}


def _share(loads: Sequence[Load], name: str) -> float:
    """CPU time over wall time of a process, the mean of all runs."""
    return statistics.fmean(load.cpu_shares[name] for load in loads)


def _load_row(loads: Sequence[Load]) -> dict[str, float]:
    lags = _middle_and_end([lag for load in loads for lag in load.lags], 3)
    return {
        "tokens_per_s": round(statistics.median(load.tokens_per_s for load in loads), 1),
        "step_ms": round(statistics.median(load.step_ms for load in loads), 2),
        "lag_growth_steps_median": lags["median"],
        "lag_growth_steps_p99": lags["p99"],
        **{f"cpu_{name.replace(' ', '_')}": round(_share(loads, name), 3) for name in loads[0].cpu_shares},
    }
