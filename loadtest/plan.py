"""The simulator of `paceline plan` against the real fleet: `make bench NAME=plan`.

Measures the demo pair's profile on this machine (see `python -m loadtest facts --help`), or takes one with --profile,
then runs 1, 8 and 32 streams through the fleet and through the simulator and prints both: tokens/s, time between
tokens, draft tokens a step and tokens a step, with speculation and without. Neither 8 nor 32 streams, nor one with
speculation, had a part in the profile. OK when tokens/s and the median time between tokens are within 15 %, at every
load and both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.closedloop import Prompts, closed_loop
from loadtest.facts import (
    add_arguments,
    bench_prompts,
    measure_engines,
    measure_fleet,
    profile_fleet,
    requests,
    simulated,
)
from loadtest.flags import bench_parser
from loadtest.fleet import machine
from paceline.planning.profile import Profile, read_profile, write_profile
from paceline.planning.simulation import Outcome, Way

STREAMS = (1, 8, 32)
MOST_OFF = 0.15
FIGURES = ("tokens/s", "ITL p50 ms", "ITL p95 ms", "gamma", "tokens/step")
# Those that decide, and at how many places they are shown.
CHECKED = ("tokens/s", "ITL p50 ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One load, one way: what the fleet did (medians of its rounds) and what the simulator says."""

    streams: int
    way: Way
    real: dict[str, float]
    simulated: dict[str, float]

    def ratio(self, figure: str) -> float:
        """Simulated over real."""
        return self.simulated[figure] / self.real[figure] if self.real[figure] else 1.0

    @property
    def ok(self) -> bool:
        """Whether all that is checked is near enough."""
        return all(abs(self.ratio(figure) - 1.0) <= MOST_OFF for figure in CHECKED)


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("plan", __doc__)
    add_arguments(parser)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="loads (default 1 8 32)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds at each load, their medians count (default 3)")
    parser.add_argument("--profile", type=Path, default=None, help="profile to use instead of measuring one")
    parser.add_argument("--keep-profile", type=Path, default=None, help="file to write the profile to")
    raise SystemExit(0 if asyncio.run(check(parser.parse_args())) else 1)


async def check(arguments: argparse.Namespace) -> bool:
    """Measures, simulates and prints the table; True when all of it is near enough."""
    prompts = bench_prompts()
    engines = None if arguments.profile else measure_engines(prompts, arguments)
    async with profile_fleet(arguments) as fleet:
        if engines is None:
            profile = read_profile(arguments.profile)
        else:
            profile = await measure_fleet(fleet, engines, prompts, arguments)
        if arguments.keep_profile:
            write_profile(profile, arguments.keep_profile)
        print(_facts(profile), flush=True)
        rows = []
        for streams in arguments.streams:
            for way in (Way.PLAIN, Way.TIER):
                rows.append(
                    await _row(fleet.endpoint("gateway").second_address, profile, prompts, streams, way, arguments)
                )
                print(_line(rows[-1]), flush=True)
    return _show(rows)


def _facts(profile: Profile) -> str:
    target, drafter = profile.target, profile.drafter.device
    return (
        f"target {1e3 * target.seconds(1, num_sessions=1):.2f} ms a plain step, drafter "
        f"{1e3 * drafter.seconds(4, num_sessions=1):.2f} ms a step of 4 rows, link {1e3 * profile.link_s:.2f} ms, "
        f"door {1e3 * profile.door_s:.2f} ms, overhead {profile.drafting_overhead:.2f}, noise {target.noise:.3f}"
    )


async def _row(
    address: str, profile: Profile, prompts: Prompts, streams: int, way: Way, arguments: argparse.Namespace
) -> Row:
    asked = requests(prompts, streams)
    rounds = []
    for _ in range(arguments.rounds):
        outcome, _ = await closed_loop(
            address,
            asked,
            max_tokens=arguments.max_tokens,
            streams=streams,
            speculation=way is Way.TIER,
            title=f"{way.value}, {streams} streams",
        )
        rounds.append(_figures(outcome))
    real = {name: median(each[name] for each in rounds) for name in FIGURES}
    expected = _figures(simulated(profile, asked, arguments.max_tokens, streams, way=way))
    return Row(streams=streams, way=way, real=real, simulated=expected)


def _figures(outcome: Outcome) -> dict[str, float]:
    p50, p95, _ = outcome.itl_s()
    values = (outcome.tokens_per_s, 1e3 * p50, 1e3 * p95, outcome.gamma, outcome.tokens_per_step)
    return dict(zip(FIGURES, values, strict=True))


def _line(row: Row) -> str:
    cells = [f"{name} {row.real[name]:.1f}/{row.simulated[name]:.1f} ({row.ratio(name):.2f})" for name in FIGURES]
    return f"{row.streams:3} streams, {row.way.value:15} real/simulated: " + "  ".join(cells)


def _show(rows: Sequence[Row]) -> bool:
    print("\n| streams | way | " + " | ".join(f"{name}: real, simulated, ratio" for name in FIGURES) + " |")
    print("| --- " * (2 + len(FIGURES)) + "|")
    for row in rows:
        cells = [f"{row.real[name]:.2f}, {row.simulated[name]:.2f}, {row.ratio(name):.2f}" for name in FIGURES]
        print(f"| {row.streams} | {row.way.value} | " + " | ".join(cells) + " |")
    ok = all(row.ok for row in rows)
    loads: list[dict[str, Any]] = [
        {
            "streams": row.streams,
            "way": row.way.value,
            "real": {name: round(value, 3) for name, value in row.real.items()},
            "simulated": {name: round(value, 3) for name, value in row.simulated.items()},
            "ok": row.ok,
        }
        for row in rows
    ]
    print(json.dumps({"bench": "plan", "machine": machine(), "most_off": MOST_OFF, "loads": loads, "ok": ok}))
    return ok
