"""One stream, the whole fleet: `make bench NAME=single`.

Every prompt is decoded in turn by

  plain, 1 core     the verifier on one core, speculation disabled by the request
  speculative       the same verifier, its drafter on the other core
  plain, all cores  a fleet without drafters whose verifier may use every core
  taking turns      a verifier on every core with its draft model inside, which takes turns with it ("placement":
                    "verifier"): what one is left with who has this one machine, and one stream

so that three ratios come out: a tier on hardware of its own (speculative against plain on one core), and on equal
hardware (against plain on all cores) the tier and the drafter inside, of which the better counts. Decode time counts,
from the first token to the last; of the rounds the median. A ratio is met within its standard
error. Rounds go on until both ratios are known to one percent or
lie three standard errors from what is asked, or there were --most-rounds. Texts of all must be equal. The target is the
demo target widened to 98 M parameters, with --large to 400 M too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from loadtest.client import Ask, Completion, Completions, asks_of, complete, completed, http_client, joined, same_texts
from loadtest.flags import add_round_flags, bench_parser
from loadtest.fleet import OWN_HARDWARE, bench_fleet, machine, widened_target
from loadtest.trial import Trial, rounded_error, take_turns

PLAIN, SPECULATIVE, ALL_CORES, IN_TURN = "plain, 1 core", "speculative", "plain, all cores", "taking turns"
WAYS = (PLAIN, SPECULATIVE, ALL_CORES, IN_TURN)
# Least ratios at temperature 0: (hardware of its own, equal hardware); at 0.8 this share of each.
LEAST = {"98m": (2.1, 1.6), "400m": (2.3, 2.2)}
SAMPLED_SHARE = 0.85
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class Case:
    """One model at one temperature: completions by prompt and way of decoding, one a round."""

    model: str
    temperature: float
    done: Mapping[tuple[int, str], Sequence[Completion]]

    def of(self, way: str) -> list[Completions]:
        """All prompts decoded one way, round by round."""
        by_prompt = [done for (_, its_way), done in self.done.items() if its_way == way]
        return [Completions(each) for each in zip(*by_prompt, strict=True)]

    def speeds(self, way: str) -> list[float]:
        """Decode tokens/s of each round."""
        return [each.decode_tokens_per_s for each in self.of(way)]

    def trial(self, way: str, base: str) -> Trial:
        """One way over another."""
        return Trial.of(self.speeds(way), self.speeds(base))

    @property
    def own(self) -> Trial:
        """The tier on hardware of its own."""
        return self.trial(SPECULATIVE, PLAIN)

    @property
    def equal(self) -> Trial:
        """Speculation on equal hardware, the better way of both."""
        ways = (self.trial(way, ALL_CORES) for way in (SPECULATIVE, IN_TURN))
        return max(ways, key=lambda trial: trial.ratio)

    @property
    def least(self) -> list[float]:
        """What is asked, on hardware of its own and on equal hardware."""
        share = 1.0 if self.temperature == 0 else SAMPLED_SHARE
        return [limit * share for limit in LEAST[self.model]]

    @property
    def is_known(self) -> bool:
        """Whether another round would say little."""
        own, equal = self.least
        return self.own.is_known(own) and self.equal.is_known(equal)

    def figures(self) -> dict[str, Any]:
        """What goes into the table and the last line."""
        least_own, least_equal = self.least
        speculative = joined(self.of(SPECULATIVE))
        same = same_texts(each for way in WAYS for each in self.of(way))
        return {
            "model": self.model,
            "temperature": self.temperature,
            "tokens_per_s": {way: round(statistics.median(self.speeds(way)), 1) for way in WAYS},
            "own_hardware": round(self.own.ratio, 3),
            "equal_hardware": round(self.trial(SPECULATIVE, ALL_CORES).ratio, 3),
            "equal_hardware_in_turn": round(self.trial(IN_TURN, ALL_CORES).ratio, 3),
            "least": [round(limit, 3) for limit in self.least],
            "rounds": self.own.num_rounds,
            "error": rounded_error(self.own),
            "mean_acceptance_length": round(speculative.mean_acceptance_length, 2),
            "gamma": round(speculative.mean_gamma, 2),
            "hit_rate": round(speculative.hit_rate, 3),
            "same_texts": same,
            "ok": self.own.meets(least=least_own) and self.equal.meets(least=least_equal) and same,
        }


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("single", __doc__)
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts (default 8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt (default 128)")
    add_round_flags(parser, 3, 8)
    parser.add_argument("--large", action="store_true", help="the 400 M widening too (800 MB; takes longer)")
    arguments = parser.parse_args()
    raise SystemExit(0 if asyncio.run(measure(arguments)) else 1)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all models and prints the table; True when every ratio is met."""
    cases: list[Case] = []
    for model in ("98m", "400m") if arguments.large else ("98m",):
        cases += await _model(model, arguments)
    rows = [case.figures() for case in cases]
    print(f"{'target':7} {'temp':>5} {'plain 1':>9} {'spec.':>8} {'plain all':>10} {'in turn':>8} {'own':>6} "
          f"{'equal':>6} {'in turn':>8} {'length':>7} {'gamma':>6} {'hits':>5}")  # fmt: skip
    for row in rows:
        print("{model:7} {temperature:5g} ".format(**row) + "{:9.1f} {:8.1f} {:10.1f} {:8.1f}".format(
            *row["tokens_per_s"].values()) + " {own_hardware:6.2f} {equal_hardware:6.2f} {equal_hardware_in_turn:8.2f} "
            "{mean_acceptance_length:7.2f} {gamma:6.2f} {hit_rate:5.2f}".format(**row))  # fmt: skip
    ok = all(row["ok"] for row in rows)
    print(f"decode tokens/s at batch size 1; {arguments.prompts} prompts x {arguments.max_tokens} tokens; {machine()}")
    print(json.dumps({"bench": "single", "machine": machine(), "batch_size": 1, "cases": rows, "ok": ok}))
    return ok


async def _model(model: str, arguments: argparse.Namespace) -> list[Case]:
    settings = widened_target(model)
    async with AsyncExitStack() as stack:
        own = await stack.enter_async_context(bench_fleet(**settings, **OWN_HARDWARE))
        alone = await stack.enter_async_context(bench_fleet(**settings, drafter=False))
        inside = json.dumps(
            {"method": "draft_model+ngram", "placement": "verifier", "model": str(settings["draft_model"])}
        )
        in_turn = await stack.enter_async_context(bench_fleet(**settings, drafter=False, speculative_config=inside))
        client = await stack.enter_async_context(http_client())
        ways = {
            PLAIN: (own.gateway_url, {"enabled": False}),
            SPECULATIVE: (own.gateway_url, {"enabled": True}),
            ALL_CORES: (alone.gateway_url, {"enabled": False}),
            IN_TURN: (in_turn.gateway_url, {"enabled": True}),
        }
        return [await _case(client, model, temperature, ways, arguments) for temperature in TEMPERATURES]


async def _case(
    client: aiohttp.ClientSession,
    model: str,
    temperature: float,
    ways: dict[str, tuple[str, dict[str, bool]]],
    arguments: argparse.Namespace,
) -> Case:
    asks = asks_of(arguments.prompts, arguments.max_tokens, temperature)
    await _warm_up(client, asks, ways)

    async def measure_side(side: tuple[int, str]) -> Completion:
        number, way = side
        url, speculation = ways[way]
        return await completed(client, url, replace(asks[number], speculation=speculation))

    done = await take_turns(
        [(number, way) for number in range(len(asks)) for way in ways],
        measure_side,
        rounds=arguments.rounds,
        most_rounds=arguments.most_rounds,
        is_known=lambda done: Case(model, temperature, done).is_known,
        title=f"{model}, temperature {temperature:g}",
    )
    return Case(model, temperature, done)


async def _warm_up(client: aiohttp.ClientSession, asks: Sequence[Ask], ways: dict[str, Any]) -> None:
    """Fills the prefix caches, and lets the controller meet the load."""
    for url, speculation in ways.values():
        for ask in asks:
            await complete(client, url, replace(ask, speculation=speculation, max_tokens=8))
