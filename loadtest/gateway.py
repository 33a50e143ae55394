"""What the gateway costs: HTTP and server-sent events against gRPC straight to the verifier. `make bench NAME=gateway`.

Part 1, one stream at a time: the same session through the gateway and straight to the verifier, by turns, speculation
off. Judged is the median of the pairwise difference of the time per output token. The target is the bundled demo target
as it is, not widened: its steps are short, so that a fraction of a millisecond shows.

Part 2, 64 streams at once, all through the gateway or all straight, by turns. Judged are the tokens/s of HTTP over
those of gRPC, and that no stream falls behind: one more session, the witness, runs straight on the verifier beside the
64, and as all sessions commit in the same steps, its tokens say when each step was done. The growth of a stream's lag
from a quarter of its tokens to its last, counted in the witness's steps, must stay below 2 steps for 99 % of the
streams: a gateway that hands out more slowly than the verifier commits is behind by more with every token.

The verifier has the first CPU to itself; gateway and load generator share the others, as on hosts of their own: where
the kernel happens to put a woken process is not asked here. The load generator is this process: it notes bytes and
times while streams run and looks into them afterwards. The CPU shares in the table, of one core each, say who was busy;
this process must stay well below a core.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from loadtest.flags import bench_parser
from loadtest.fleet import bench_fleet, machine
from loadtest.procfs import cpu_s, keep_to
from loadtest.streams import DirectWay, HttpWay, Streamed
from loadtest.trial import Trial, rounded_error, take_turns
from paceline.checkpoints.corpus import unseen_prompts
from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import available_cpus
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.text.codec import TextCodec

MOST_OVERHEAD_MS = 0.3
LEAST_RATIO = 0.95
MOST_LAG_STEPS = 2.0
# Beyond it the generator, not the gateway, would be what is measured.
MOST_GENERATOR_SHARE = 0.7
WITNESS_TOKENS = 32
WAYS = ("direct", "http")
GENERATOR = "load generator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One session to run either way: greedy, speculation off."""

    prompt: tuple[int, ...]
    max_tokens: int

    def body(self) -> dict[str, Any]:
        """For the gateway."""
        return {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "speculation": {"enabled": False},
        }

    def request(self, session_id: str) -> GenerateRequest:
        """For the verifier."""
        return GenerateRequest(
            session_id=session_id,
            epoch=1,
            prompt_token_ids=self.prompt,
            sampling=SamplingParams(max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True),
            speculation=SpeculationParams(enabled=False),
        )


class Ways:
    """Both ways into one fleet."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._direct = DirectWay(fleet.endpoint("verifier").address)
        self._http = HttpWay(fleet.gateway_url)
        self._numbers = itertools.count()

    async def run(self, way: str, session: Session) -> Streamed:
        """Streams a session."""
        if way == "http":
            return await self._http.stream(session.body() | {"stream_options": {"include_usage": True}})
        return await self._direct.stream(session.request(f"bench-{next(self._numbers)}"))

    async def close(self) -> None:
        """Closes the channel."""
        await self._direct.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One run of one way with many streams at once.

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
    parser.add_argument("--pairs", type=int, default=60, help="sessions each way, one at a time (default 60)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens of a session (default 128)")
    parser.add_argument("--streams", type=int, default=64, help="streams at once in part 2 (default 64)")
    parser.add_argument("--load-tokens", type=int, default=64, help="tokens of a session in part 2 (default 64)")
    parser.add_argument("--rounds", type=int, default=5, help="runs each way in part 2 (default 5)")
    parser.add_argument(
        "--load-model", choices=("demo", "widened"), default="widened", help="target of part 2 (default widened)"
    )
    arguments = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raise SystemExit(0 if runner.run(measure(arguments)) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs both parts and prints them; True when both are met."""
    print(f"{machine()}; speculation off, greedy")
    one = await measure_overhead(arguments)
    many = await measure_load(arguments)
    ok = bool(one["ok"] and many["ok"])
    print(json.dumps({"bench": "gateway", "machine": machine(), "one_stream": one, "many_streams": many, "ok": ok}))
    return ok


@asynccontextmanager
async def _fleet(model: Path | None, *verifier_arg: str) -> AsyncIterator[LocalFleet]:
    """A fleet without drafters, each tier on CPUs of its own."""
    named = {} if model is None else {"model": model, "draft_model": DEMO_DRAFTER}
    first, *others = available_cpus()
    # A message for each token, so that what one costs is seen.
    flags = (f"--cpus={first}", "--stream-interval-s=0", *verifier_arg)
    fleet = bench_fleet(drafter=False, verifier_threads=1, verifier_arg=flags, **named)
    async with fleet:
        if others:
            keep_to(fleet.pid("gateway"), others)
            keep_to(os.getpid(), others)
        try:
            yield fleet
        finally:
            keep_to(os.getpid(), [first, *others])


def _sessions(fleet: LocalFleet, count: int, max_tokens: int) -> list[Session]:
    assert fleet.checkpoints is not None, "the fleet runs"
    codec = TextCodec.from_folder(fleet.checkpoints.target)
    return [
        Session(
            prompt=codec.encode(prompt, field="prompt", special_tokens=True, context_len=2048), max_tokens=max_tokens
        )
        for prompt in unseen_prompts(count)
    ]


# Part 1


async def measure_overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs the pairs, prints both ways and returns the figures."""
    async with _fleet(DEMO_TARGET) as fleet:
        sessions = _sessions(fleet, min(arguments.pairs, 40), arguments.max_tokens)
        ways = Ways(fleet)
        for session in sessions:
            # Both ways then find the prompt in the prefix cache.
            await ways.run("http", session)
        # Each way meets them in the same order.
        to_run = {way: itertools.cycle(sessions) for way in WAYS}
        runs = await take_turns(
            WAYS, lambda way: ways.run(way, next(to_run[way])), rounds=arguments.pairs, title="pairs"
        )
        await ways.close()
        model = fleet.model_name
    return _overhead(model, runs)


def _overhead(model: str, runs: dict[str, list[Streamed]]) -> dict[str, Any]:
    pairs = list(zip(runs["direct"], runs["http"], strict=True))
    differences_ms = [1e3 * (http.per_token_s - direct.per_token_s) for direct, http in pairs]
    rows = {way: _way(runs[way]) for way in WAYS}
    figures: dict[str, Any] = {
        "model": model,
        "batch_size": 1,
        "pairs": len(pairs),
        **rows,
        "overhead_ms": {
            "median": round(statistics.median(differences_ms), 4),
            "p99": round(float(np.quantile(differences_ms, 0.99)), 4),
        },
        "ratio": round(rows["http"]["per_token_ms"] / rows["direct"]["per_token_ms"], 4),
    }
    figures["ok"] = figures["overhead_ms"]["median"] <= MOST_OVERHEAD_MS
    _print_overhead(figures)
    return figures


def _way(runs: Sequence[Streamed]) -> dict[str, float]:
    gaps_ms = [1e3 * gap_s for run in runs for gap_s in run.gaps_s]
    return {
        "per_token_ms": round(statistics.median(1e3 * run.per_token_s for run in runs), 4),
        "gap_p99_ms": round(float(np.quantile(gaps_ms, 0.99)), 3),
        "first_token_ms": round(statistics.median(1e3 * (run.times_s[0] - run.started_s) for run in runs), 3),
    }


def _print_overhead(figures: dict[str, Any]) -> None:
    print(f"\none stream at a time, {figures['model']}, {figures['pairs']} pairs")
    print(f"{'':22}{'ms/token':>10}{'gap p99':>10}{'first':>10}")
    for way in WAYS:
        print(f"{_TITLES[way]:22}" + "".join(f"{value:10.3f}" for value in figures[way].values()))
    overhead = figures["overhead_ms"]
    print(f"{'ratio':22}{figures['ratio']:10.3f}")
    print(
        f"pairwise difference: median {overhead['median']:.3f} ms a token (at most {MOST_OVERHEAD_MS} is asked), "
        f"p99 {overhead['p99']:.3f} ms"
    )


_TITLES = {"direct": "gRPC to the verifier", "http": "HTTP to the gateway"}

# Part 2


async def measure_load(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs many streams both ways by turns, prints both and returns the figures."""
    model = DEMO_TARGET if arguments.load_model == "demo" else None
    seats = arguments.streams + 1
    async with _fleet(model, f"--max-num-seqs={seats}") as fleet:
        *sessions, last = _sessions(fleet, seats, arguments.load_tokens)
        # The witness outlives the others by what it may have begun earlier.
        witness = Session(prompt=last.prompt, max_tokens=arguments.load_tokens + WITNESS_TOKENS)
        ways = Ways(fleet)
        await _run_load(ways, "http", sessions, witness)
        loads = await take_turns(
            WAYS,
            lambda way: _measure_load(fleet, ways, way, sessions, witness),
            rounds=arguments.rounds,
            title=f"{arguments.streams} streams",
        )
        await ways.close()
        name = fleet.model_name
    return _load_figures(name, arguments.streams, loads)


async def _run_load(
    ways: Ways, way: str, sessions: Sequence[Session], witness: Session
) -> tuple[list[Streamed], Streamed]:
    seen, *streams = await asyncio.gather(
        ways.run("direct", witness), *(ways.run(way, session) for session in sessions)
    )
    return streams, seen


async def _measure_load(fleet: LocalFleet, ways: Ways, way: str, sessions: Sequence[Session], witness: Session) -> Load:
    pids = {GENERATOR: os.getpid(), "verifier": fleet.pid("verifier"), "gateway": fleet.pid("gateway")}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    started_s = time.perf_counter()
    streams, seen = await _run_load(ways, way, sessions, witness)
    wall_s = time.perf_counter() - started_s
    cpu_shares = {name: (cpu_s(pid) - before[name]) / wall_s for name, pid in pids.items()}
    first_s, last_s = min(run.started_s for run in streams), max(run.ended_s for run in streams)
    step_s = statistics.median(seen.gaps_s)
    # A stream with a character made of several tokens has fewer pieces than steps and cannot be laid beside them.
    whole = [run for run, session in zip(streams, sessions, strict=True) if len(run.times_s) == session.max_tokens]
    return Load(
        tokens_per_s=sum(session.max_tokens for session in sessions) / (last_s - first_s),
        totals_s=[run.ended_s - run.started_s for run in streams],
        lags=[lag_growth_s(run.times_s, seen.times_s) / step_s for run in whole],
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


def _load_figures(model: str, num_streams: int, loads: Mapping[str, Sequence[Load]]) -> dict[str, Any]:
    direct, http = loads["direct"], loads["http"]
    behind_ms = [
        1e3 * (mine - its)
        for over, straight in zip(http, direct, strict=True)
        for mine, its in zip(over.totals_s, straight.totals_s, strict=True)
    ]
    trial = Trial.of((load.tokens_per_s for load in http), (load.tokens_per_s for load in direct))
    figures: dict[str, Any] = {
        "model": model,
        "batch_size": num_streams,
        **{way: _load_row(runs) for way, runs in loads.items()},
        "ratio": round(trial.ratio, 4),
        "error": rounded_error(trial),
        "total_difference_ms": {
            "median": round(statistics.median(behind_ms), 1),
            "p99": round(float(np.quantile(behind_ms, 0.99)), 1),
        },
    }
    # What one gateway process can carry is the inverse of it.
    figures["gateway_cpu_ms_per_token"] = round(1e3 * _share(http, "gateway") / figures["http"]["tokens_per_s"], 4)
    figures["generator_ok"] = max(_share(runs, GENERATOR) for runs in loads.values()) <= MOST_GENERATOR_SHARE
    keeps_up = figures["http"]["lag_growth_steps_p99"] <= MOST_LAG_STEPS
    figures["ok"] = trial.meets(least=LEAST_RATIO) and keeps_up and figures["generator_ok"]
    _print_load(figures)
    return figures


def _share(loads: Sequence[Load], name: str) -> float:
    """CPU time over wall time of a process, the mean of all runs."""
    return statistics.fmean(load.cpu_shares[name] for load in loads)


def _load_row(loads: Sequence[Load]) -> dict[str, float]:
    lags = [lag for load in loads for lag in load.lags]
    return {
        "tokens_per_s": round(statistics.median(load.tokens_per_s for load in loads), 1),
        "step_ms": round(statistics.median(load.step_ms for load in loads), 2),
        "lag_growth_steps_median": round(statistics.median(lags), 3),
        "lag_growth_steps_p99": round(float(np.quantile(lags, 0.99)), 3),
        **{f"cpu_{name.replace(' ', '_')}": round(_share(loads, name), 3) for name in loads[0].cpu_shares},
    }


def _print_load(figures: dict[str, Any]) -> None:
    print(f"\n{figures['batch_size']} streams at once, {figures['model']}")
    heads = ("tokens/s", "step ms", "lag p50", "lag p99", "generator", "verifier", "gateway")
    print(f"{'':22}" + "".join(f"{head:>10}" for head in heads))
    for way in WAYS:
        print(f"{_TITLES[way]:22}" + "".join(f"{value:10.2f}" for value in figures[way].values()))
    difference = figures["total_difference_ms"]
    print(f"{'ratio':22}{figures['ratio']:10.3f}   (at least {LEAST_RATIO} is asked)")
    print(f"gateway: {figures['gateway_cpu_ms_per_token']:.3f} ms of CPU a token")
    print(
        f"HTTP total - direct total: median {difference['median']:.0f} ms, p99 {difference['p99']:.0f} ms; "
        f"lag: growth in steps (p99 at most {MOST_LAG_STEPS:g} is asked); generator, verifier, gateway: CPU shares"
    )
