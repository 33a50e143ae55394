"""The controller against three oracles on the same load: `make bench NAME=controller`.

Replays a load that ramps from 1 session to 64 and back (or one made from a public trace) through the real controller
in a world whose truth is known (see `loadtest/replay.py`), then through

  clairvoyant   knows the target's tokens: verifies nothing in vain
  optimum       knows true probabilities and step times, and changes its mind for nothing
  best fixed    the best fixed gamma of each load in hindsight

and prints regret against the optimum, wasted rows, switches a minute and the calibration error. Step times are those
of this machine's engine when --profile is given, else of the reference machine.

Arrival traces: the hour-long traces of Azure's LLM services (AzureLLMInferenceTrace_conv.csv in the public repository
Azure/AzurePublicDataset); give the CSV, plain or gzipped, as --trace.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from tqdm import tqdm

from loadtest.flags import bench_parser
from loadtest.fleet import machine
from loadtest.replay import Optimum, Policy, RealPolicy, Replay, ReplayResult, World
from paceline.core.draft_policy import FixedGamma, Goodput
from paceline.core.step_time import StepCost, StepTimes

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

Load = Sequence[tuple[float, int]]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("controller", __doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="time at each load of the ramp (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the world (default 0)")
    parser.add_argument("--trace", type=Path, default=None, help="arrivals from a CSV with a TIMESTAMP column")
    arguments = parser.parse_args()
    load = ramp(arguments.seconds) if arguments.trace is None else traced(arguments.trace, 14 * arguments.seconds)
    raise SystemExit(0 if compare(World(cost=REFERENCE, seed=arguments.seed), load) else 1)


def ramp(seconds: float) -> Load:
    """1, 2, 4, ... 64, ... 2, 1 sessions for so many seconds each."""
    counts = [*LOADS, *LOADS[-2::-1]]
    return [*((index * seconds, count) for index, count in enumerate(counts)), (len(counts) * seconds, 1)]


def traced(path: Path, seconds: float) -> Load:
    """Sessions under way in a trace of arrivals, scaled to `seconds` and to 64 sessions at most."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    arrivals = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    spans = [(at, at + 0.03 * int(row["GeneratedTokens"])) for at, row in zip(arrivals, rows, strict=True)]
    first, last = arrivals[0], arrivals[-1]
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
    figures = _figures(results)
    _show(results, figures)
    return bool(figures["ok"])


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


def _figures(results: dict[str, ReplayResult]) -> dict[str, object]:
    ours, optimum = results["controller"], results["optimum"]
    best_fixed = {
        load: max(_rate(results[f"gamma {gamma}"], counts) for gamma in GAMMAS)
        for load, counts in _buckets(ours).items()
    }
    against_fixed = {load: _rate(ours, counts) / best_fixed[load] for load, counts in _buckets(ours).items()}
    # Time is weighted as the load gives it: what the optimum would have done in the same seconds.
    ideal = sum(_rate(optimum, [count]) * seconds for count, seconds in ours.seconds.items())
    regret = 1.0 - sum(ours.tokens.values()) / ideal
    return {
        "bench": "controller",
        "regret": round(regret, 4),
        "against_best_fixed": {load: round(ratio, 3) for load, ratio in against_fixed.items()},
        "of_clairvoyant": round(ours.tokens_per_s / results["clairvoyant"].tokens_per_s, 3),
        "wasted_rows": round((ours.verified - ours.accepted) / max(1, ours.rows), 3),
        "switches_per_minute": round(60 * ours.switches / sum(ours.seconds.values()), 2),
        "calibration_error": round(ours.calibration_error, 4),
        "ok": regret < MOST_REGRET and min(against_fixed.values()) >= LEAST_OF_FIXED,
    }


def _show(results: dict[str, ReplayResult], figures: dict[str, object]) -> None:
    buckets = _buckets(results["controller"])
    print(f"{'tokens/s at sessions':24}" + "".join(f"{load:>9}" for load in buckets))
    for name, result in results.items():
        rates = "".join(f"{_rate(result, counts):9.1f}" for counts in buckets.values())
        print(f"{name:24}{rates}   acceptance {result.accepted / max(1, result.verified):.2f}")
    print(f"\nregret {figures['regret']:.1%} of the optimum (limit {MOST_REGRET:.0%}); of the best fixed gamma of each "
          f"load {figures['against_best_fixed']} (limit {LEAST_OF_FIXED}); replayed on {machine()}")  # fmt: skip
    print(json.dumps(figures))
