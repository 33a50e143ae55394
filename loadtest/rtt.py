"""Speed against the round trip between verifier and drafter: `make bench NAME=rtt`.

A proxy of this bench stands between the two, at every setting, and delays each direction by half the round trip: the
drafter announces the proxy's address instead of its own (`--announce`). Concurrency 1, greedy, decoding only. Every
round of the bench decodes the same prompts plainly and then at each round trip, every other one in the opposite order,
so that a slow minute of the machine meets all of them; shown are medians over the rounds. Rounds go on until the ratios
that are judged are known to one percent or lie three standard errors from what is asked, or there were --most-rounds.

The bench is met when all texts are equal to the plain ones, and at every round trip below the measured verify step
decoding is at most 10 % slower than at 0 ms, within the standard error: what the drafter does ahead must hide a delay
that is no longer than the step. In the table:

* ratio: decode tokens/s over plain decoding of the same round; to 0 ms: over the same round's row of 0 ms; error:
  standard error of the latter
* hits: rounds whose committed tokens were all in the tree already, so the drafter goes on without looking back
* length: mean acceptance length, 1 + accepted / speculative steps; gamma: draft tokens verified a speculative step
* drafted: speculative steps among all steps; answer: from a commit to the first node that builds on it, as the
  verifier sees it, drafting included
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from loadtest.client import Ask, asks_of, run_batch, same_texts
from loadtest.flags import add_round_flags, bench_parser
from loadtest.fleet import bench_fleet, machine
from loadtest.measured import Measured, Turn, settled_turn
from loadtest.proxy import DelayProxy
from loadtest.trial import rounded_error, take_turns
from paceline.cluster.local import LocalFleet
from paceline.cluster.valkey import free_port

LEAST_TO_ZERO = 0.90
STEP, ANSWER = "paceline:step_seconds", "paceline:draft_round_trip_seconds"
# Milliseconds between the tiers; None is plain decoding.
RoundTrip = float | None
HOST = "127.0.0.1"


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("rtt", __doc__)
    parser.add_argument("--prompts", type=int, default=6, help="prompts a round (default 6)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt (default 128)")
    add_round_flags(parser, 3, 12)
    parser.add_argument(
        "--round-trips-ms",
        type=float,
        nargs="+",
        default=[0.0, 1.0, 5.0, 20.0],
        help="round trips to inject; the first is what the others are compared with (default 0 1 5 20)",
    )
    raise SystemExit(0 if asyncio.run(measure(parser.parse_args())) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Runs all rounds and prints the table; True when the bench is met."""
    asks = asks_of(arguments.prompts, arguments.max_tokens)
    drafter_port = free_port(HOST)
    with DelayProxy((HOST, drafter_port)) as proxy:
        # A drafter that far away lends no cores to its verifier.
        fleet = bench_fleet(lend=False, drafter_port=drafter_port, drafter_arg=(f"--announce={proxy.address}",))
        async with fleet:
            # Both ways then find every prompt in the prefix cache.
            await run_batch(fleet.gateway_url, [replace(ask, max_tokens=1) for ask in asks], 1, "prompts")
            turns = await take_turns(
                [None, *dict.fromkeys(arguments.round_trips_ms)],
                lambda round_trip: _measure_one(fleet, proxy, round_trip, asks),
                rounds=arguments.rounds,
                most_rounds=arguments.most_rounds,
                is_known=lambda turns: _is_known(_settings(turns)),
                title="round trips",
            )
            model = fleet.model_name
    figures = _figures(_settings(turns))
    _print_table(figures)
    print(json.dumps({"bench": "rtt", "machine": machine(), "model": model, **figures}))
    return bool(figures["ok"])


async def _measure_one(fleet: LocalFleet, proxy: DelayProxy, round_trip: RoundTrip, asks: Sequence[Ask]) -> Turn:
    if round_trip is None:
        asks = [replace(ask, speculation={"enabled": False}) for ask in asks]
    else:
        proxy.set_round_trip(round_trip / 1e3)
    metrics = fleet.endpoint("verifier").second_address
    return await settled_turn(fleet.gateway_url, metrics, asks, 1, _title(round_trip))


def _title(round_trip: RoundTrip) -> str:
    return "plain" if round_trip is None else f"{round_trip:g} ms"


def _settings(turns: Mapping[RoundTrip, Sequence[Turn]]) -> dict[RoundTrip, Measured]:
    return {round_trip: Measured(its) for round_trip, its in turns.items()}


def _delayed(settings: Mapping[RoundTrip, Measured]) -> dict[float, Measured]:
    """Those that speculate; the first is what the others are compared with."""
    return {round_trip: each for round_trip, each in settings.items() if round_trip is not None}


def _judged(settings: Mapping[RoundTrip, Measured]) -> dict[float, Measured]:
    """Those whose round trip is below the verify step."""
    delayed = _delayed(settings)
    verify_step_ms = next(iter(delayed.values())).mean_ms(STEP)
    return {round_trip: each for round_trip, each in delayed.items() if round_trip < verify_step_ms}


def _is_known(settings: Mapping[RoundTrip, Measured]) -> bool:
    zero = next(iter(_delayed(settings).values()))
    return all(each.over(zero).is_known(LEAST_TO_ZERO) for each in _judged(settings).values())


def _figures(settings: Mapping[RoundTrip, Measured]) -> dict[str, Any]:
    plain, delayed, judged = settings[None], _delayed(settings), _judged(settings)
    zero = next(iter(delayed.values()))
    same = same_texts(turn.result for each in settings.values() for turn in each.turns)
    return {
        "batch_size": 1,
        "rounds": len(plain.turns),
        "plain_tokens_per_s": round(plain.tokens_per_s, 1),
        "plain_step_ms": round(plain.mean_ms(STEP), 2),
        "verify_step_ms": round(zero.mean_ms(STEP), 2),
        "round_trips": {_title(round_trip): _row(each, plain, zero) for round_trip, each in delayed.items()},
        "judged": [_title(round_trip) for round_trip in judged],
        "same_text": same,
        "ok": same and all(each.over(zero).meets(least=LEAST_TO_ZERO) for each in judged.values()),
    }


def _row(setting: Measured, plain: Measured, zero: Measured) -> dict[str, float | None]:
    done, to_zero = setting.completions, setting.over(zero)
    return {
        "tokens_per_s": round(setting.tokens_per_s, 1),
        "ratio": round(setting.over(plain).ratio, 3),
        "to_zero": round(to_zero.ratio, 3),
        "error": rounded_error(to_zero),
        "hit_rate": round(done.hit_rate, 3),
        "mean_acceptance_length": round(done.mean_acceptance_length, 3),
        "mean_gamma": round(done.mean_gamma, 2),
        "drafted_steps": round(done.total("num_spec_steps") / max(1, done.total("num_steps")), 3),
        "answer_ms": round(setting.mean_ms(ANSWER), 2),  # 0: no answer was in time to be one
    }


def _print_table(figures: dict[str, Any]) -> None:
    print(f"{machine()}; batch size 1, greedy")
    print(f"plain step {figures['plain_step_ms']:.2f} ms, verify step {figures['verify_step_ms']:.2f} ms\n")
    heads = ("tokens/s", "ratio", "to 0 ms", "error", "hits", "length", "gamma", "drafted", "answer ms")
    print(f"{'round trip':12}" + "".join(f"{head:>10}" for head in heads))
    print(f"{'plain':12}{figures['plain_tokens_per_s']:10.1f}{1:10.3f}")
    for title, row in figures["round_trips"].items():
        cells = ("-" if value is None else f"{value:g}" for value in row.values())
        print(f"{title:12}" + "".join(f"{cell:>10}" for cell in cells))
    print(f"\nat least {LEAST_TO_ZERO} of the speed at 0 ms is asked at: {', '.join(figures['judged'])}")
    print("all texts equal" if figures["same_text"] else "TEXTS DIFFER")
