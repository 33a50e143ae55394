"""The highest rate that a fleet holds: every trial replays the densest stretch that the whole replay would have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from loadtest.client import replay
from loadtest.fleet import say
from loadtest.prompts import Prompts
from loadtest.streams import Completion, Door
from loadtest.traffic.config import LoadConfig
from loadtest.traffic.plan import Source, densest, requests_of
from paceline.core.errors import ConfigError

NUM_BURST = 32
# The first trial, as a share of the rate at which a burst was answered: a replay has denser moments than its mean.
FIRST_SHARE = 0.8
# Trials go up or down by this factor until one rate is held and another is not, then between the two until they are
# this near.
STEP, NEAR = 1.4, 1.15
MAX_TRIALS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRate:
    """One rate that was tried: whether it was held, and what that was judged by."""

    rate_per_s: float
    held: bool
    ttft_p95_s: float
    itl_p95_s: float
    num_errors: int


async def highest_rate(door: Door, source: Source, prompts: Prompts, config: LoadConfig) -> list[TriedRate]:
    """Tries rates until the highest held one is known to a few percent; returns the trials, that one last.

    Raises:
        ConfigError: None was held.
    """
    rate: float | None = FIRST_SHARE * await _burst_rate(door, source, prompts, config)
    trials: list[TriedRate] = []
    while rate is not None and len(trials) < MAX_TRIALS:
        arrivals = source.arrivals(rate)
        # Prompts that no window uses, and no other trial.
        other = replace(config, seed=config.seed + 1 + len(trials))
        requests = requests_of(arrivals, prompts, other)
        stretch = [replace(each, index=-1 - each.index) for each in densest(requests, config.trial_s)]
        trials.append(judged(rate, await replay(door, stretch), config))
        trial = trials[-1]
        say(
            f"{trial.rate_per_s:.2f} requests/s: {'held' if trial.held else 'not held'} (p95 of first tokens "
            f"{trial.ttft_p95_s:.2f} s, between tokens {trial.itl_p95_s:.3f} s; {trial.num_errors} errors)"
        )
        rate = next_rate(trials)
    held = [trial for trial in trials if trial.held]
    if not held:
        raise ConfigError(
            f"--rate max: not even {trials[-1].rate_per_s:.3g} requests a second were held within {MAX_TRIALS} trials; "
            "give a --rate, or a longer --max-ttft-s or --max-itl-s"
        )
    held.sort(key=lambda trial: trial.rate_per_s)
    return [trial for trial in trials if trial is not held[-1]] + [held[-1]]


def judged(rate_per_s: float, answers: Sequence[Completion], config: LoadConfig) -> TriedRate:
    """Judges a trial: held are 95 % of first tokens and 95 % of requests' mean times between tokens, and no error.

    More requests than can be served show in the one while they share steps, and in the other when they queue.
    """
    good = [each for each in answers if not each.error]
    ttft_p95_s = _p95(each.ttft_s for each in good)
    itl_p95_s = _p95(fmean(gaps_s) for each in good if (gaps_s := each.token_gaps_s))
    num_errors = len(answers) - len(good)
    return TriedRate(
        rate_per_s=rate_per_s,
        held=not num_errors and ttft_p95_s <= config.max_ttft_s and itl_p95_s <= config.max_itl_s,
        ttft_p95_s=ttft_p95_s,
        itl_p95_s=itl_p95_s,
        num_errors=num_errors,
    )


def _p95(values: Iterable[float]) -> float:
    known = list(values)
    return float(np.percentile(known, 95)) if known else float("inf")


def next_rate(trials: Sequence[TriedRate]) -> float | None:
    """Returns the rate to try next; None when the highest held one is known well enough."""
    held = max((trial.rate_per_s for trial in trials if trial.held), default=None)
    # One that failed below a held one had bad luck.
    failed = min(
        (trial.rate_per_s for trial in trials if not trial.held and trial.rate_per_s > (held or 0.0)), default=None
    )
    if failed is None:
        return held and held * STEP
    if held is None:
        return failed / STEP
    return None if failed / held <= NEAR else math.sqrt(held * failed)


async def _burst_rate(door: Door, source: Source, prompts: Prompts, config: LoadConfig) -> float:
    """Requests a second of a burst of the trace's requests, all sent at once, until three in four have ended.

    The longest of them end alone.
    """
    arrivals = source.arrivals(NUM_BURST / config.duration_s)
    requests = requests_of(arrivals, prompts, replace(config, seed=config.seed + MAX_TRIALS + 1))
    answers = await replay(door, [replace(each, due_s=0.0) for each in requests])
    ends_s = sorted(each.ended_s for each in answers)
    most = max(1, 3 * len(ends_s) // 4)
    return most / ends_s[most - 1]
