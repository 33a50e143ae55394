"""The controller against three oracles on the same load: `make bench NAME=controller`.

Replays a load that ramps from 1 session to 64 and back (or one made from a public trace) through the real controller
in a world whose truth is known (see `loadtest/replay.py`), and then through

  clairvoyant   knows the target's tokens: verifies nothing in vain
  optimum       knows true probabilities and step times, and changes its mind for nothing
  best fixed    the best fixed gamma of each load in hindsight

and prints regret against the optimum, wasted rows, switches a minute and the calibration error. Step times are those
of the reference machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from loadtest.bench import bench_parser, report, show
from loadtest.replay import Optimum, Policy, RealPolicy, Replay, ReplayResult, World
from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.step_time import StepCost, StepTimes
from paceline.planning.arrivals import read_arrivals

# A 98 M model on one core of the reference machine: seconds by rows.
REFERENCE = StepCost(
    rows=(1, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
    seconds=(0.0117, 0.0118, 0.0123, 0.0153, 0.0204, 0.0227, 0.0318, 0.0496, 0.0746, 0.0979, 0.1393, 0.1733),
)
LOADS = (1, 2, 4, 8, 16, 32, 64)
CAP = 12
GAMMAS = (0, 1, 2, 3, 4, 6, 8, 12)
MOST_REGRET = 0.05
LEAST_OF_FIXED = 0.98
# How long a token of a traced answer is taken to last.
SECONDS_A_TOKEN = 0.03

Load = Sequence[tuple[float, int]]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("controller", __doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="time at each load of the ramp (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the world (default 0)")
    parser.add_argument("--trace", type=Path, default=None, help="trace of arrivals, as of paceline plan --trace")
    arguments = parser.parse_args()
    load = ramp(arguments.seconds) if arguments.trace is None else traced(arguments.trace, 14 * arguments.seconds)
    raise SystemExit(0 if compare(World(cost=REFERENCE, seed=arguments.seed), load) else 1)


def ramp(seconds: float) -> Load:
    """1, 2, 4, ... 64, ... 2, 1 sessions, each for that number of seconds."""
    counts = [*LOADS, *LOADS[-2::-1]]
    return [*((index * seconds, count) for index, count in enumerate(counts)), (len(counts) * seconds, 1)]


def traced(path: Path, seconds: float) -> Load:
    """Sessions under way in a trace of arrivals, scaled to `seconds` and to 64 sessions at most."""
    requests = read_arrivals(path)
    spans = [(each.at_s, each.at_s + SECONDS_A_TOKEN * each.num_output_tokens) for each in requests]
    first, last = requests[0].at_s, requests[-1].at_s
    ticks = [first + (last - first) * index / 200 for index in range(200)]
    counts = [sum(start <= tick < end for start, end in spans) for tick in ticks]
    peak = max(counts)
    load = [(seconds * index / 200, max(1, round(64 * count / peak))) for index, count in enumerate(counts)]
    return [*load, (seconds, 1)]


def compare(world: World, load: Load) -> bool:
    """Prints the table; True when regret and the comparison with fixed gammas are within their limits."""
    policies: dict[str, Callable[[], Policy]] = {
        "controller": lambda: RealPolicy(Goodput(StepTimes(REFERENCE), max_nodes=CAP), CAP),
        "optimum": lambda: Optimum(world, CAP, clairvoyant=False),
        "clairvoyant": lambda: Optimum(world, CAP, clairvoyant=True),
        **{f"gamma {gamma}": _fixed(gamma) for gamma in GAMMAS},
    }
    results = {
        name: Replay(world, make(), load).run()
        for name, make in tqdm(policies.items(), desc="replaying", unit="policy", leave=False)
    }
    rows, buckets = [], _buckets(results["controller"])
    for name, result in results.items():
        rates = {f"at {load}": round(_rate(result, counts), 1) for load, counts in buckets.items()}
        rows.append({"tokens/s": name, **rates, "acceptance": round(result.accepted / max(1, result.verified), 2)})
    show(rows)
    figures = _figures(results)
    print(f"limits: regret {MOST_REGRET:.0%} of the optimum, {LEAST_OF_FIXED} of the best fixed gamma of each load")
    return report("controller", **figures)


def _fixed(gamma: int) -> Callable[[], Policy]:
    return lambda: RealPolicy(FixedGamma(gamma=gamma), CAP)


def _rate(result: ReplayResult, bucket: Sequence[int]) -> float:
    seconds = sum(result.seconds[count] for count in bucket)
    return sum(result.tokens[count] for count in bucket) / seconds if seconds else 0.0


def _buckets(result: ReplayResult) -> dict[int, list[int]]:
    """Session counts met, by the least power of two that holds them."""
    buckets: dict[int, list[int]] = {}
    for count in sorted(result.seconds):
        buckets.setdefault(next(load for load in LOADS if count <= load), []).append(count)
    return buckets


def _figures(results: dict[str, ReplayResult]) -> dict[str, Any]:
    ours, optimum = results["controller"], results["optimum"]
    against_fixed = {
        load: _rate(ours, counts) / max(_rate(results[f"gamma {gamma}"], counts) for gamma in GAMMAS)
        for load, counts in _buckets(ours).items()
    }
    # Time is weighted as the load gives it: what the optimum would have done in the same seconds.
    ideal = sum(_rate(optimum, [count]) * seconds for count, seconds in ours.seconds.items())
    regret = 1.0 - sum(ours.tokens.values()) / ideal
    return {
        "regret": round(regret, 4),
        "against_best_fixed": {load: round(ratio, 3) for load, ratio in against_fixed.items()},
        "of_clairvoyant": round(ours.tokens_per_s / results["clairvoyant"].tokens_per_s, 3),
        "wasted_rows": round((ours.verified - ours.accepted) / max(1, ours.rows), 3),
        "switches_per_minute": round(60 * ours.switches / sum(ours.seconds.values()), 2),
        "calibration_error": round(ours.calibration_error, 4),
        "ok": regret < MOST_REGRET and min(against_fixed.values()) >= LEAST_OF_FIXED,
    }
