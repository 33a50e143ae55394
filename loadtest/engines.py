"""vLLM plain, with its own draft model, and with the drafter tier: `make bench NAME=engines`.

`vllm serve` of vLLM's CPU build has the demo target, widened, in bf16 on this machine's cores and is asked over HTTP,
its three processes on the cores of its side, in turn; with --pair, another pair that has a draft model:

  plain         on all cores, and on all but the drafter's
  own, k = 3    with its own draft model on all cores, 3 guesses a step (5, 7), as many at any load
  tier          on all cores but the last, which is the drafter's and that of the helper process; the drafter runs at
                idle priority, as `paceline up` starts it; before it is measured, `paceline rehearse` has shown it both
                modes at each load

at 1, 8 and 32 streams, greedily and at temperature 0.8. Every round measures every side, each in a process of its own,
every other round in the opposite order; ratios are made within a round and their median counts. The tier's goals:

  greedy, 1 stream     0.95 of the best of vLLM's own drafts
  greedy, 8 streams    1.0 of the best of vLLM's own drafts
  greedy, 32 streams   0.98 of plain on vLLM's cores
  temperature 0.8      0.95 of plain on vLLM's cores

A ratio is met within its standard error. The first run sets vLLM up in the user's cache folder, and every start of a
server takes a minute or two. A part, in 10 minutes: --streams 1 --temperature 0 --draft-lengths 7 --rounds 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.bench import bench_parser, report, run, show
from loadtest.fleet import DEMO, PAIRS, lone_drafter, named_pair, say
from loadtest.peers.inside.protocol import Job
from loadtest.peers.run import PeerFigure, case_of, encoded_prompts
from loadtest.trial import Trial, rounded_error, take_turns
from loadtest.vllm_server import served_figures
from paceline.checkpoints.families import is_eagle3
from paceline.cluster.checkpoints import WIDENED_SIZES
from paceline.cluster.spec import available_cpus
from paceline.core.errors import ConfigError, UnavailableError
from tools.environments import environment
from tools.processes import CommandFailedError

ENVIRONMENT = "vllm-test"
MAX_TOKENS = 128
TIER = "tier"
PLAIN_ALL, PLAIN_SAME = "plain, all cores", "plain, vLLM's cores"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A way to run vLLM.

    Attributes:
        name: In the table.
        cores: Cores of the engine.
        draft_length: Most guesses of a step; None: plain.
        drafter_cores: Cores of the drafter tier; none without it.
    """

    name: str
    cores: tuple[int, ...]
    draft_length: int | None = None
    drafter_cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A goal of the tier: a ratio to the fastest of some sides."""

    least: float
    base: str
    sides: Sequence[str]


@dataclass(frozen=True, slots=True)
class Load:
    """A number of streams at a temperature."""

    streams: int
    temperature: float


# Decode tokens/s by side, a figure a round.
Speeds = Mapping[str, Sequence[float]]


def main() -> None:
    """Parses the command line and runs the bench; exit status 1 when a goal is missed."""
    parser = bench_parser("engines", __doc__)
    parser.add_argument("--pair", choices=PAIRS, default=DEMO, help="needs a draft model (default: the demo pair)")
    parser.add_argument(
        "--target", choices=list(WIDENED_SIZES), default="98m", help="size of the demo target (default 98m)"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32], help="(default 1 8 32)")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8], help="(default 0 0.8)")
    parser.add_argument(
        "--draft-lengths", type=int, nargs="+", default=[3, 5, 7], help="of vLLM's own drafts (default 3 5 7)"
    )
    parser.add_argument("--passes", type=int, default=1, help="over the prompts, the median counts (default 1)")
    parser.add_argument("--rounds", type=int, default=3, help="(default 3)")
    # Through the clean-ups that stop vLLM and the drafter.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all sides and prints the table; True when every goal is met."""
    cores = available_cpus()
    if len(cores) < 2:
        raise SystemExit("two cores are needed: one of them is the drafter's")
    try:
        python = environment(ENVIRONMENT, os.environ, say)
        results = await _results(python, sides_of(cores, arguments.draft_lengths), arguments)
    except (CommandFailedError, ConfigError, UnavailableError, RuntimeError) as error:
        raise SystemExit(f"engines: {error}") from None
    loads = [Load(streams, temperature) for temperature in arguments.temperature for streams in arguments.streams]
    rows = [row_of(load, speeds_at(load, results)) for load in loads]
    places = [{"streams": row["streams"], "temperature": row["temperature"]} for row in rows]
    show(place | row["tokens_per_s"] for place, row in zip(places, rows, strict=True))
    show(place | asked for place, row in zip(places, rows, strict=True) for asked in row["asked"])
    print(f"decode tokens/s while all streams decoded, bf16, {MAX_TOKENS} new tokens")
    ok = all(asked["met"] for row in rows for asked in row["asked"])
    return report("engines", pair=arguments.pair, target=arguments.target, cases=rows, ok=ok)


def sides_of(cores: Sequence[int], draft_lengths: Sequence[int]) -> list[Side]:
    """All that take turns, on these cores, of which the last is the drafter's."""
    everything, engine, drafter = tuple(cores), tuple(cores[:-1]), tuple(cores[-1:])
    return [
        Side(name=PLAIN_ALL, cores=everything),
        Side(name=PLAIN_SAME, cores=engine),
        *(Side(name=f"own, k = {length}", cores=everything, draft_length=length) for length in draft_lengths),
        Side(name=TIER, cores=engine, draft_length=max(draft_lengths), drafter_cores=drafter),
    ]


async def _results(
    python: Path, sides: Sequence[Side], arguments: argparse.Namespace
) -> dict[Side, list[list[PeerFigure]]]:
    """Figures of all sides, a list a round.

    Raises:
        CommandFailedError: vLLM failed; a table with holes would compare nothing.
    """
    pair = named_pair(arguments.pair, arguments.target)
    target, draft = pair["model"], pair["draft_model"]
    if draft is None or is_eagle3(draft):
        raise ConfigError(f"--pair {arguments.pair}: has no draft model, which both vLLM and the tier draft with here")
    prompts = encoded_prompts(draft, max(case_of(each).num_prompts for each in arguments.streams))
    with tempfile.TemporaryDirectory() as learned_dir:

        async def figures_of(side: Side, drafters: Sequence[str]) -> list[PeerFigure]:
            job = Job(
                target=str(target),
                draft=str(draft),
                draft_length=side.draft_length,
                prompts=prompts,
                max_new_tokens=MAX_TOKENS,
                passes=arguments.passes,
                cores=side.cores,
                cases=[case_of(each) for each in arguments.streams],
                drafters=drafters,
                drafter_cores=side.drafter_cores,
                learned_dir=learned_dir,
            )
            return await served_figures(python, job, arguments.temperature)

        async def measure_side(side: Side) -> list[PeerFigure]:
            if not side.drafter_cores:
                return await figures_of(side, [])
            async with lone_drafter(draft, side.drafter_cores) as address:
                return await figures_of(side, [address])

        return await take_turns(sides, measure_side, rounds=arguments.rounds, title="engines")


def speeds_at(load: Load, results: Mapping[Side, Sequence[Sequence[PeerFigure]]]) -> dict[str, list[float]]:
    """Decode tokens/s of all sides at a load, by their names, round by round."""
    return {
        side.name: [
            figure.decode_tokens_per_s
            for figures in rounds
            for figure in figures
            if (figure.streams, figure.temperature) == (load.streams, load.temperature)
        ]
        for side, rounds in results.items()
    }


def goals_of(load: Load, names: Sequence[str]) -> list[Goal]:
    """The tier's goals at a load, by the names of all sides."""
    own = [name for name in names if name.startswith("own")]
    if load.temperature > 0:
        return [Goal(least=0.95, base="plain", sides=[PLAIN_SAME])]
    if load.streams < 32:
        return [Goal(least=0.95 if load.streams == 1 else 1.0, base="own drafts", sides=own)]
    return [Goal(least=0.98, base="plain", sides=[PLAIN_SAME])]


def row_of(load: Load, speeds: Speeds) -> dict[str, Any]:
    """Figures of a load, and the goals there with what is reached of them."""
    asked = []
    for goal in goals_of(load, list(speeds)):
        best = max(goal.sides, key=lambda name: statistics.median(speeds[name]))
        trial = Trial.of(speeds[TIER], speeds[best])
        asked.append(
            {
                "of": goal.base,
                "side": best,
                "ratio": round(trial.ratio, 3),
                "error": rounded_error(trial),
                "least": goal.least,
                "met": trial.meets(least=goal.least),
            }
        )
    return {
        "streams": load.streams,
        "temperature": load.temperature,
        "tokens_per_s": {name: round(statistics.median(each), 1) for name, each in speeds.items()},
        "asked": asked,
    }
