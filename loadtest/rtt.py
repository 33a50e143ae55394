"""Speed against the round trip between verifier and drafter: `make bench NAME=rtt`.

A proxy of this bench stands between the two, at every setting, and delays each direction by half the round trip: the
drafter announces the proxy's address instead of its own (`--announce`). Concurrency 1, greedy, decoding only. Every
round of the bench decodes the same prompts plainly and then at each round trip, every other one in the opposite order,
so that a slow minute of the machine meets all of them; shown are medians over the rounds. Rounds go on until the ratios
that are judged are known to one percent or lie three standard errors from what is asked, or there were --most-rounds.

The bench is met when all texts are equal to the plain ones, and at every round trip below the measured verify step
decoding is at most 10 % slower than at 0 ms: what the drafter does ahead must hide a delay that is no longer than the
step. In the table:

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
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loadtest.client import Ask, BatchResult, run_batch
from loadtest.fleet import bench_fleet, machine
from loadtest.proxy import DelayProxy
from loadtest.rounds import is_known, standard_error
from loadtest.scrape import MeanOf, scrape
from paceline.cluster.local import LocalFleet
from paceline.training.corpus import unseen_prompts

LEAST_TO_ZERO = 0.90
# Tokens decoded untimed after each change: the verifier has to learn how long answers take now.
SETTLE_TOKENS = 96
PLAIN = {"enabled": False}


@dataclass(slots=True)
class Setting:
    """What was measured at one round trip; None is plain decoding."""

    round_trip_ms: float | None
    results: list[BatchResult] = field(default_factory=list)
    step: MeanOf = field(default_factory=lambda: MeanOf("paceline:step_seconds"))
    answer: MeanOf = field(default_factory=lambda: MeanOf("paceline:draft_round_trip_seconds"))

    @property
    def title(self) -> str:
        """Name in the table."""
        return "plain" if self.round_trip_ms is None else f"{self.round_trip_ms:g} ms"

    @property
    def speeds(self) -> list[float]:
        """Decode tokens/s of each round of the bench."""
        return [decode_speed(result) for result in self.results]

    def ratios_to(self, other: Setting) -> list[float]:
        """This speed over the other one's, of each round."""
        return [mine / its for mine, its in zip(self.speeds, other.speeds, strict=True)]

    def ratio_to(self, other: Setting) -> float:
        """Median over the rounds of this speed over the other one's."""
        return statistics.median(self.ratios_to(other))

    def total(self, key: str) -> int:
        """Sum of an entry of the speculation records."""
        return sum(result.total(key) for result in self.results)

    def texts(self) -> list[list[str]]:
        """Texts of each round."""
        return [[each.text for each in result.completions] for result in self.results]


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = argparse.ArgumentParser(
        prog="rtt", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=6, help="prompts a round (default 6)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="least rounds over all settings (default 3)")
    parser.add_argument("--most-rounds", type=int, default=12, help="most rounds (default 12)")
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
    asks = [Ask(prompt=prompt, max_tokens=arguments.max_tokens) for prompt in unseen_prompts(arguments.prompts)]
    settings = [Setting(None), *(Setting(each) for each in arguments.round_trips_ms)]
    drafter_port = _free_port()
    with DelayProxy(("127.0.0.1", drafter_port)) as proxy:
        # A drafter that far away lends no cores to its verifier.
        fleet = bench_fleet(lend=False, drafter_port=drafter_port, drafter_arg=(f"--announce={proxy.address}",))
        async with fleet:
            model = fleet.model_name
            # Both ways then find every prompt in the prefix cache.
            await run_batch(fleet.gateway_url, [replace(ask, max_tokens=1) for ask in asks], 1, "prompts")
            for index in range(max(arguments.rounds, arguments.most_rounds)):
                if index >= arguments.rounds and _is_known(settings):
                    break
                for setting in settings[:: -1 if index % 2 else 1]:
                    await _measure_one(fleet, proxy, setting, asks, f"round {index + 1}, {setting.title}")
    figures = _figures(settings)
    _print_table(settings, figures)
    print(json.dumps({"bench": "rtt", "machine": machine(), "model": model, **figures}))
    return bool(figures["ok"])


async def _measure_one(fleet: LocalFleet, proxy: DelayProxy, setting: Setting, asks: Sequence[Ask], title: str) -> None:
    verifier = fleet.endpoint("verifier").second_address
    if setting.round_trip_ms is None:
        asks = [replace(ask, speculation=PLAIN) for ask in asks]
    else:
        proxy.set_round_trip(setting.round_trip_ms / 1e3)
    await run_batch(fleet.gateway_url, [replace(asks[0], max_tokens=SETTLE_TOKENS)], 1, f"{title}, settling")
    before = await scrape(verifier)
    setting.results.append(await run_batch(fleet.gateway_url, asks, 1, title))
    after = await scrape(verifier)
    setting.step.add(before, after)
    setting.answer.add(before, after)


def decode_speed(result: BatchResult) -> float:
    """Tokens/s from each completion's first piece to its last, over all completions."""
    spans_s = [each.piece_times_s[-1] - each.piece_times_s[0] for each in result.completions]
    return sum(each.num_tokens - 1 for each in result.completions) / sum(spans_s)


def _judged(settings: Sequence[Setting]) -> list[Setting]:
    """Those whose round trip is below the verify step."""
    verify_step_ms = 1e3 * settings[1].step.value
    return [each for each in settings[1:] if each.round_trip_ms is not None and each.round_trip_ms < verify_step_ms]


def _is_known(settings: Sequence[Setting]) -> bool:
    return all(is_known(each.ratios_to(settings[1]), LEAST_TO_ZERO) for each in _judged(settings))


def _figures(settings: Sequence[Setting]) -> dict[str, Any]:
    plain, zero, *_ = settings
    rows = {each.title: _row(each, plain, zero) for each in settings[1:]}
    same = all(each.texts() == plain.texts() for each in settings[1:])
    judged = _judged(settings)
    return {
        "batch_size": 1,
        "rounds": len(plain.results),
        "plain_tokens_per_s": round(statistics.median(plain.speeds), 1),
        "plain_step_ms": round(1e3 * plain.step.value, 2),
        "verify_step_ms": round(1e3 * zero.step.value, 2),
        "round_trips": rows,
        "judged": [each.title for each in judged],
        "same_text": same,
        "ok": same and all(rows[each.title]["to_zero"] >= LEAST_TO_ZERO for each in judged),
    }


def _row(setting: Setting, plain: Setting, zero: Setting) -> dict[str, float]:
    hits, misses = setting.total("num_hits"), setting.total("num_misses")
    spec_steps, steps = setting.total("num_spec_steps"), setting.total("num_steps")
    return {
        "tokens_per_s": round(statistics.median(setting.speeds), 1),
        "ratio": round(setting.ratio_to(plain), 3),
        "to_zero": round(setting.ratio_to(zero), 3),
        "error": round(standard_error(setting.ratios_to(zero)), 3) if len(setting.results) > 1 else 0.0,
        "hit_rate": round(hits / max(1, hits + misses), 3),
        "mean_acceptance_length": round(1 + setting.total("num_accepted_draft_tokens") / max(1, spec_steps), 3),
        "mean_gamma": round(setting.total("num_draft_tokens") / max(1, spec_steps), 2),
        "drafted_steps": round(spec_steps / max(1, steps), 3),
        "answer_ms": round(1e3 * setting.answer.value, 2),  # 0: no answer was in time to be one
    }


def _print_table(settings: Sequence[Setting], figures: dict[str, Any]) -> None:
    print(f"{machine()}; batch size 1, greedy")
    print(f"plain step {figures['plain_step_ms']:.2f} ms, verify step {figures['verify_step_ms']:.2f} ms\n")
    heads = ("tokens/s", "ratio", "to 0 ms", "error", "hits", "length", "gamma", "drafted", "answer ms")
    print(f"{'round trip':12}" + "".join(f"{head:>10}" for head in heads))
    print(f"{'plain':12}{figures['plain_tokens_per_s']:10.1f}{1:10.3f}")
    for each in settings[1:]:
        print(f"{each.title:12}" + "".join(f"{value:10g}" for value in figures["round_trips"][each.title].values()))
    print(f"\nat least {LEAST_TO_ZERO} of the speed at 0 ms is asked at: {', '.join(figures['judged'])}")
    print("all texts equal" if figures["same_text"] else "TEXTS DIFFER")


def _free_port() -> int:
    """A port for the drafter, known before it starts, because the proxy in front of it is told first."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
