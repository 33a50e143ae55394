"""The controller against the best fixed choice: `make bench NAME=controller`.

Twenty random devices, each with a load of its own: a draft step takes 0.03 to 0.8 of the target's, a first guess is
right with a chance of 0.3 to 0.95, and 1 to 128 sessions run. On each of them the planner's simulation serves the same
requests with the engines that serve: with the controller, fresh (it knows nothing but what verifiers measure at start)
and after a rehearsal; and with each fixed gamma, 0 among them: that is plain decoding.

OK when the controller loses at most 3 % against the best fixed gamma after its first 100 steps, in the mean (being
ahead makes up for nothing), and for the tokens of no 200 steps, the first ones included, takes more than 3 % longer
than plain decoding does for the same tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from tqdm import tqdm

from loadtest.bench import bench_parser, report, show
from paceline.core.draft_policy import FixedGamma
from paceline.core.target_events import DrafterNews, TargetOutput
from paceline.planning.engines import DrafterAtWork, JumpingLoop, Request, VerifierAtWork, simulate
from paceline.simulated.guesses import GuessLaw
from paceline.simulated.profile import COMPUTED, DeviceFacts, DrafterFacts, Profile

GAMMAS = (0, 1, 3, 6, 12)
CONTROLLERS = FRESH, REHEARSED = "fresh", "rehearsed"
# Steps of the controller, those before its regret counts, and those in which it may lose nothing to plain decoding.
STEPS, WARM_UP, WINDOW = 500, 100, 200
# Steps of the fixed choices, which learn nothing; plain ones are compared step by step.
FIXED_STEPS = 300
MOST_REGRET = MOST_LOSS = 0.03
# No step takes longer.
STEP_S, LONGEST_S, MAX_ROWS = 0.02, 1.0, 512
NUM_PROMPT_TOKENS, OUTPUT_TOKENS = 16, (160, 480)


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("controller", __doc__)
    parser.add_argument("--profiles", type=int, default=20, help="random devices (default 20)")
    parser.add_argument("--seed", type=int, default=0, help="of all of them (default 0)")
    arguments = parser.parse_args()
    cases = [Case.drawn(arguments.seed + number) for number in range(arguments.profiles)]
    raise SystemExit(0 if compare(cases) else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A random device with its load.

    Attributes:
        draft: Of the time of a target's step, that of a drafter's.
        acceptance: Chance of a first guess.
        knee: Rows from which on rows cost time.
        overhead: Share by which steps take longer while drafters work.
    """

    seed: int
    draft: float
    acceptance: float
    knee: int
    overhead: float
    num_sessions: int

    @classmethod
    def drawn(cls, seed: int) -> Case:
        luck = np.random.default_rng(seed)
        return cls(
            seed=seed,
            draft=math.exp(luck.uniform(math.log(0.03), math.log(0.8))),
            acceptance=luck.uniform(0.3, 0.95),
            knee=round(2.0 ** luck.uniform(4.0, 8.5)),
            overhead=float(luck.choice((0.0, 0.0, 0.1, 0.3))),
            num_sessions=2 ** int(luck.integers(0, 8)),
        )

    def profile(self) -> Profile:
        rest: dict[str, Any] = {"kv_tokens": 1 << 17, "max_sessions": 128, "max_rows": MAX_ROWS, "noise": 0.03}
        rows, seconds = (1, self.knee, MAX_ROWS), (STEP_S, 1.1 * STEP_S, 1.1 * STEP_S * MAX_ROWS / self.knee)
        drafter = DrafterFacts(
            name="random",
            rows=(1, MAX_ROWS),
            seconds=(self.draft * STEP_S, 4.0 * self.draft * STEP_S),
            draft_rows=64,
            **rest,
        )
        return Profile(
            name=f"random {self.seed}",
            kind=COMPUTED,
            origin="drawn",
            colocated_kv_tokens=1 << 17,
            drafting_overhead=self.overhead,
            target=DeviceFacts(name="random", rows=rows, seconds=seconds, session_s=2e-5, **rest),
            drafter=drafter,
            colocated=drafter,
            acceptance=GuessLaw(confidence_mean=math.log(self.acceptance / (1.0 - self.acceptance)), seed=self.seed),
        )

    def shown(self) -> dict[str, float]:
        return {
            "draft": round(self.draft, 2),
            "acceptance": round(self.acceptance, 2),
            "knee": self.knee,
            "overhead": self.overhead,
            "sessions": self.num_sessions,
        }


class Watched(VerifierAtWork):
    """A verifier at work whose steps are kept: when each ended, and all tokens up to then."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self.steps: list[tuple[float, int]] = [(0.0, 0)]
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def _deliver(self, output: DrafterNews) -> None:
        if isinstance(output, TargetOutput) and output.report.num_rows:
            report = output.report
            self.steps.append((self._loop.time(), self.steps[-1][1] + len(report.gammas) + sum(report.accepted)))
        super()._deliver(output)


def steps_of(case: Case, choice: str | int) -> list[tuple[float, int]]:
    """Serves a case with a fixed gamma, or a controller; returns end and tokens of all steps up to each."""
    return simulate(lambda loop: _served(case, choice, loop))


async def _served(case: Case, choice: str | int, loop: JumpingLoop) -> list[tuple[float, int]]:
    profile, numbers = case.profile(), itertools.count()
    policy = FixedGamma(gamma=choice) if isinstance(choice, int) else None
    drafter = DrafterAtWork(profile, loop, case.seed)
    verifier = Watched(profile, loop, colocated=False, drafter=drafter, policy=policy, seed=case.seed)

    async def stream() -> None:
        for number in numbers:
            length = int(np.random.default_rng((case.seed, number)).integers(*OUTPUT_TOKENS))
            await verifier.serve(Request(number, loop.time(), NUM_PROMPT_TOKENS, length))

    # Held, or they might be forgotten at work.
    tasks = [loop.create_task(each.run()) for each in (drafter, verifier)]
    if choice == REHEARSED:
        await verifier.rehearse()
        verifier.steps = [(loop.time(), 0)]
    tasks += [loop.create_task(stream()) for _ in range(case.num_sessions)]
    steps = FIXED_STEPS if choice in GAMMAS[1:] else STEPS
    while len(verifier.steps) <= steps and not any(map(asyncio.Task.done, tasks)):  # noqa: ASYNC110 - a clock that jumps
        await asyncio.sleep(LONGEST_S)
    return verifier.steps


def rate(steps: Sequence[tuple[float, int]], first: int, last: int) -> float:
    """Tokens/s from one step to another."""
    (since_s, before), (until_s, after) = steps[first], steps[last]
    return (after - before) / (until_s - since_s)


def least_against(steps: Sequence[tuple[float, int]], plain: Sequence[tuple[float, int]]) -> float:
    """The worst of any `WINDOW` steps, over what plain decoding takes for the same tokens."""
    seconds, tokens = np.array(steps).T
    plain_s, plain_tokens = np.array(plain).T
    # Steps that read prompts commit nothing: a number of tokens counts from when it was reached.
    plain_tokens, first = np.unique(plain_tokens, return_index=True)
    plain_s = plain_s[first]
    # Beyond its last step, plain decoding goes on as usual.
    last = tokens[-1] + 1.0
    rest_s = (last - plain_tokens[-1]) / rate(plain, WARM_UP, len(plain) - 1)
    if rest_s > 0.0:
        plain_s, plain_tokens = np.append(plain_s, plain_s[-1] + rest_s), np.append(plain_tokens, last)
    as_plain_s = np.interp(tokens, plain_tokens, plain_s)
    ratios = (as_plain_s[WINDOW:] - as_plain_s[:-WINDOW]) / (seconds[WINDOW:] - seconds[:-WINDOW])
    return float(ratios.min())


def compare(cases: Sequence[Case]) -> bool:
    """Prints the table; True when regret and the worst steps are within their limits."""
    choices: list[str | int] = [*CONTROLLERS, *GAMMAS]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        futures = {(case, each): pool.submit(steps_of, case, each) for case in cases for each in choices}
        found = {key: each.result() for key, each in tqdm(futures.items(), desc="simulating", leave=False)}
    rows = [_row(case, {each: found[case, each] for each in choices}) for case in cases]
    show(rows)
    of_best = {each: [min(1.0, row[each]["of best"]) for row in rows] for each in CONTROLLERS}
    regret = {each: 1.0 - fmean(values) for each, values in of_best.items()}
    least = {each: min(row[each]["least of plain"] for row in rows) for each in CONTROLLERS}
    print(f"limits: regret {MOST_REGRET:.0%} of the best fixed gamma, {1.0 - MOST_LOSS} of plain in any {WINDOW} steps")
    return report(
        "controller",
        regret={each: round(value, 4) for each, value in regret.items()},
        worst_of_best={each: min(values) for each, values in of_best.items()},
        least_of_plain=least,
        ok=max(regret.values()) <= MOST_REGRET and min(least.values()) >= 1.0 - MOST_LOSS,
    )


def _row(case: Case, steps: dict[str | int, list[tuple[float, int]]]) -> dict[str, Any]:
    fixed = {gamma: rate(steps[gamma], WARM_UP, FIXED_STEPS) for gamma in GAMMAS}
    best = max(fixed, key=lambda gamma: fixed[gamma])
    figures = {
        each: {
            "of best": round(rate(steps[each], WARM_UP, STEPS) / fixed[best], 3),
            "least of plain": round(least_against(steps[each], steps[0]), 3),
        }
        for each in CONTROLLERS
    }
    return {**case.shown(), "best gamma": best, "best/plain": round(fixed[best] / fixed[0], 2), **figures}


if __name__ == "__main__":
    main()
