"""One stream, the whole fleet: `make bench NAME=single`.

Every prompt is decoded in turn by

  plain, 1 core     the verifier on one core, speculation disabled by the request
  speculative       the same verifier, its drafter on the other core
  plain, all cores  a fleet without drafters whose verifier may use every core
  taking turns      a verifier on every core with its draft model inside, which takes turns with it ("placement":
                    "verifier"): the choice of those who have this one machine, and one stream

Two ratios are judged: the tier on hardware of its own (speculative against plain on one core), and on equal hardware
(against plain on all cores) the tier or the drafter inside, whichever is better. Decode time counts, from the first
token to the last; of the rounds the median. A ratio is met within its standard error. Rounds go on until both ratios
are known to one percent or lie three standard errors from their goals, or there were --most-rounds. Texts of all must
be equal. The target is the demo target widened to 98 M parameters, with --large to 400 M too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from loadtest.bench import add_round_flags, bench_parser, report, run, show
from loadtest.client import Completions, asks_of, completed, joined, same_texts
from loadtest.fleet import OWN_HARDWARE, bench_fleet, widened_target
from loadtest.streams import Completion
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
        return max((self.trial(way, ALL_CORES) for way in (SPECULATIVE, IN_TURN)), key=lambda trial: trial.ratio)

    @property
    def least(self) -> list[float]:
        """The goals, on hardware of its own and on equal hardware."""
        share = 1.0 if self.temperature == 0 else SAMPLED_SHARE
        return [limit * share for limit in LEAST[self.model]]

    @property
    def is_known(self) -> bool:
        """Whether another round would change little."""
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
            "rounds": len(self.own.ratios),
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
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all models and prints the table; True when every ratio is met."""
    cases: list[Case] = []
    for model in ("98m", "400m") if arguments.large else ("98m",):
        cases += await _model(model, arguments)
    rows = [case.figures() for case in cases]
    show(rows)
    print(f"decode tokens/s at batch size 1; {arguments.prompts} prompts x {arguments.max_tokens} tokens")
    return report("single", batch_size=1, cases=rows, ok=all(row["ok"] for row in rows))


async def _model(model: str, arguments: argparse.Namespace) -> list[Case]:
    settings = widened_target(model)
    draft = {"method": "draft_model+ngram", "placement": "verifier", "model": str(settings["draft_model"])}
    alone = {**settings, "drafter": False}
    async with AsyncExitStack() as stack:
        own, plain, in_turn = [
            (await stack.enter_async_context(bench_fleet(**each))).gateway_url
            for each in ({**settings, **OWN_HARDWARE}, alone, {**alone, "speculative_config": json.dumps(draft)})
        ]
        urls = dict(zip(WAYS, (own, own, plain, in_turn), strict=True))
        return [await _case(model, temperature, urls, arguments) for temperature in TEMPERATURES]


async def _case(model: str, temperature: float, urls: Mapping[str, str], arguments: argparse.Namespace) -> Case:
    asks = asks_of(arguments.prompts, arguments.max_tokens, temperature)

    async def decode(side: tuple[int, str], **changes: Any) -> Completion:
        number, way = side
        speculation = {"enabled": way in (SPECULATIVE, IN_TURN)}
        return await completed(urls[way], replace(asks[number], speculation=speculation, **changes))

    sides = [(number, way) for number in range(len(asks)) for way in WAYS]
    for side in sides:
        # Fills the prefix caches, and lets the controller meet the load.
        await decode(side, max_tokens=8)
    done = await take_turns(
        sides,
        decode,
        rounds=arguments.rounds,
        most_rounds=arguments.most_rounds,
        is_known=lambda done: Case(model, temperature, done).is_known,
        title=f"{model}, temperature {temperature:g}",
    )
    return Case(model, temperature, done)
