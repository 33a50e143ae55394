"""The output of `paceline plan`: tokens a second of a profile at several loads, and fleets beside one another."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.planning.fleets import Plan
from paceline.planning.simulation import PERCENTILES, Outcome, PlannedFleet, Way, run_closed
from paceline.simulated.profile import Profile

# Streams; a profile's target may hold fewer.
LOADS = (1, 8, 32, 64, 128, 256)
PROMPT_TOKENS, MEAN_TOKENS = 16, 96
# Simulated seconds, and their share in which a load finds its pace; nothing of it counts.
SECONDS, LEAST_S, SETTLING = 60.0, 4.0, 1 / 3
# A drafter is worth having from this many times plain decoding on.
LEAST_GAIN = 1.03
# A draft step beyond this share of the target's step hardly pays at any acceptance.
SLOW = 0.5
MS = 1e3


def tokens_of(number: int, mean: int) -> int:
    """Length of a text: half to one and a half times the mean, so that texts do not begin and end in lockstep."""
    return random.Random(number).randint(mean // 2, mean * 3 // 2)


def lengths(mean_tokens: int) -> Iterator[tuple[int, int]]:
    """Prompt and output tokens of a load without end."""
    return ((PROMPT_TOKENS, tokens_of(number, mean_tokens)) for number in itertools.count())


def steady(
    profile: Profile,
    way: Way,
    streams: int,
    *,
    mean_tokens: int = MEAN_TOKENS,
    seconds: float = SECONDS,
    seed: int = 0,
) -> Outcome:
    """A load that goes on, once it has found its pace, for one verifier and, in a tier, one drafter.

    Args:
        streams: Requests that are always under way.
        mean_tokens: Mean length of a text.
        seconds: Simulated for one stream; many streams show as much in fewer, down to `LEAST_S`.
        seed: Seed of random step times.
    """
    until_s = max(LEAST_S, seconds / streams)
    [outcome] = run_closed(
        [profile],
        way,
        lengths(mean_tokens),
        streams=[streams],
        warm_up_s=SETTLING * until_s,
        until_s=until_s,
        seed=seed,
    )
    return outcome


def best_way(rates: Mapping[Way, float]) -> Way:
    """The way that pays: the fastest, unless it is hardly faster than plain decoding."""
    fastest = max(rates, key=rates.__getitem__)
    return fastest if rates[fastest] >= LEAST_GAIN * rates[Way.PLAIN] else Way.PLAIN


def promise(profile: Profile, rates: Mapping[int, Mapping[Way, float]]) -> str:
    """Tokens/s by streams and way, for somebody who reads them for the first time."""
    gpus = {way: PlannedFleet.around(way).num_gpus(profile) for way in Way}
    titles = [f"{way.value}, {count} GPU{'s' if count > 1 else ''}" for way, count in gpus.items()]
    rows = [_promise_row(streams, each) for streams, each in rates.items()]
    return (
        f"{paces(profile)}\n"
        "Tokens/s of one verifier that always has so many streams, with texts of "
        f"{MEAN_TOKENS} tokens on average;\nin brackets, how many times as fast as without speculation.\n\n"
        + markdown([("streams", *titles, "what pays"), *rows])
        + "\n"
    )


def _promise_row(streams: int, rates: Mapping[Way, float]) -> tuple[str, ...]:
    plain = rates[Way.PLAIN]
    gains = [f"{rate:,.0f} ({rate / plain:.2f}x)" for way, rate in rates.items() if way is not Way.PLAIN]
    return f"{streams:,}", f"{plain:,.0f}", *gains, best_way(rates).value


def paces(profile: Profile) -> str:
    """Step times, and whether the drafter is fast enough."""
    step_s, draft_s, inside_s = (
        each.step_s(1, num_sessions=1) for each in (profile.target, profile.drafter, profile.colocated)
    )
    share = draft_s / step_s
    slow = f"\n{profile.drafter.name} is too slow for this drafter: a draft step should take a tenth of the target's."
    return (
        f"A step takes {MS * step_s:.1f} ms; a draft step takes {MS * draft_s:.1f} ms on a device of its own "
        f"({share:.2f} of it), and {MS * inside_s:.1f} ms inside the verifier.{slow if share > SLOW else ''}"
    )


def figures(plan: Plan) -> dict[str, Any]:
    """Figures of a plan; latencies by percentile."""
    outcome, rate = plan.outcome, plan.tokens_per_s
    price, price_per_million = plan.fleet.price_per_hour(plan.profile), plan.price_per_million_tokens
    latencies = {"ttft_ms": outcome.ttft_s(), "itl_ms": outcome.itl_s(), "e2e_ms": outcome.e2e_s()}
    return {
        "way": plan.fleet.way.value,
        "verifiers": plan.fleet.num_verifiers,
        "drafters": plan.fleet.num_drafters,
        "gpus": plan.fleet.num_gpus(plan.profile),
        "price_per_hour": round(price, 2),
        "price_per_million_tokens": round(price_per_million, 3) if rate else None,
        "tokens_per_s": round(rate, 1),
        "gamma": round(outcome.gamma, 2),
        "tokens_per_step": round(outcome.tokens_per_step, 2),
        **{
            name: {f"p{at}": round(MS * value, 2) for at, value in zip(PERCENTILES, values, strict=True)}
            for name, values in latencies.items()
        },
        "simulated_requests": len(outcome.requests),
        "unfinished_requests": outcome.num_unfinished,
        "meets_goals": plan.meets,
    }


# Columns of the table: figures, and how many digits stand behind the point.
COLUMNS = {
    "verifiers": 0,
    "drafters": 0,
    "gpus": 0,
    "price_per_hour": 2,
    "price_per_million_tokens": 2,
    "tokens_per_s": 0,
    "ttft_ms": 0,
    "itl_ms": 1,
    "e2e_ms": 0,
    "gamma": 1,
}


def table(plans: Mapping[str, Mapping[str, Any]]) -> str:
    """A Markdown table, a row for the figures of each plan; latencies are p50/p95/p99."""
    rows = [
        (
            title,
            *(_cell(each[name], digits) for name, digits in COLUMNS.items()),
            "met" if each["meets_goals"] else "missed",
        )
        for title, each in plans.items()
    ]
    return markdown([("fleet", *(name.replace("_", " ") for name in COLUMNS), "goals"), *rows])


def _cell(value: Any, digits: int) -> str:
    values = value.values() if isinstance(value, Mapping) else [value]
    return "/".join("-" if each is None else f"{each:,.{digits}f}" for each in values)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose first row has the titles."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "| " + " | ".join("-" * width for width in widths) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])
