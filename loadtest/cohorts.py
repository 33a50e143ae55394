"""One cohort of sessions against two, simulated: `make bench NAME=cohorts`.

With two cohorts half of the sessions are verified while the others are drafted for, so that no step has a session
without drafts; with one, as the engine has it, every step has every session, and drafts that come too late for it wait
for the next. Both run the very controller of the fleet over the same requests. OK when two cohorts are nowhere faster
than one by more than 2 %.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from tqdm import tqdm

from paceline.planning.__main__ import profile_of
from paceline.planning.config import PlanConfig
from paceline.planning.profile import Profile
from paceline.planning.simulation import Cell, Outcome, Way, run_closed

STREAMS = (1, 2, 4, 8, 16, 32, 64)
MOST_BEHIND = 0.98
LENGTHS = (128, 128)
REQUESTS_A_STREAM = 4


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = argparse.ArgumentParser(
        prog="cohorts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profiles", nargs="+", default=["demo", "8b+1b@h100+l4"], help="as for `paceline plan`")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each, whose mean counts (default %(default)s)")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(arguments.profiles) * len(STREAMS), desc="cohorts", unit="load", leave=False) as bar:
        for name in arguments.profiles:
            profile = profile_of(PlanConfig(profile=name, rate=1.0))
            for streams in STREAMS:
                rows.append({"profile": name, **compare(profile, streams, arguments.seeds)})
                bar.update()
    print(f"{'profile':16} {'streams':>7} {'one, tok/s':>11} {'two, tok/s':>11} {'one/two':>8} {'length':>13}")
    for row in rows:
        line = "{profile:16} {streams:7d} {one:11.0f} {two:11.0f} {ratio:8.3f} {one_length:6.2f} {two_length:6.2f}"
        print(line.format(**row))
    ok = all(row["ratio"] >= MOST_BEHIND for row in rows)
    print(f"requests of {LENGTHS[0]} prompt and {LENGTHS[1]} output tokens, simulated, mean of {arguments.seeds} seeds")
    print(json.dumps({"bench": "cohorts", "rows": rows, "ok": ok}))
    raise SystemExit(0 if ok else 1)


def compare(profile: Profile, streams: int, seeds: int) -> dict[str, Any]:
    """Tokens/s and acceptance lengths of one verifier and one drafter with one cohort and with two."""
    one, two = ([_run(profile, streams, cohorts, seed) for seed in range(seeds)] for cohorts in (1, 2))
    rates = [sum(each.tokens_per_s for each in outcomes) / seeds for outcomes in (one, two)]
    lengths = [sum(each.tokens_per_step for each in outcomes) / seeds for outcomes in (one, two)]
    return {
        "streams": streams,
        "one": round(rates[0], 1),
        "two": round(rates[1], 1),
        "ratio": round(rates[0] / rates[1], 3),
        "one_length": round(lengths[0], 2),
        "two_length": round(lengths[1], 2),
    }


def _run(profile: Profile, streams: int, num_cohorts: int, seed: int) -> Outcome:
    cell = Cell(way=Way.TIER, num_verifiers=1, num_drafters=1, num_cohorts=num_cohorts)
    return run_closed(profile, cell, [LENGTHS] * (REQUESTS_A_STREAM * streams), streams=streams, seed=seed)


if __name__ == "__main__":
    main()
