"""One stream, the whole fleet: `make bench NAME=single`.

Every prompt is decoded in turn by

  plain, 1 core     the verifier on one core, speculation disabled by the request
  speculative       the same verifier, its drafter on the other core
  plain, all cores  a fleet without drafters whose verifier may use every core
  taking turns      a verifier on every core with its draft model inside, which takes turns with it ("placement":
                    "verifier"): what one is left with who has this one machine, and one stream

so that three ratios come out: a tier on hardware of its own (speculative against plain on one core), and on equal
hardware (against plain on all cores) the tier and the drafter inside, of which the better counts. Decode time counts,
from the first token to the last; of the rounds the median. Rounds go on until both ratios are known to one percent or
lie three standard errors from what is asked, or there were --most-rounds. Texts of all must be equal. The target is the
demo target widened to 98 M parameters, with --large to 400 M too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from tqdm import tqdm

from loadtest.client import Ask, Completion, complete, http_client
from loadtest.fleet import bench_fleet, machine, widened_target
from loadtest.rounds import is_known, standard_error
from paceline.training.corpus import unseen_prompts

PLAIN, SPECULATIVE, ALL_CORES, IN_TURN = "plain, 1 core", "speculative", "plain, all cores", "taking turns"
# Least ratios at temperature 0: (hardware of its own, equal hardware); at 0.8 this share of each.
LEAST = {"98m": (2.1, 1.6), "400m": (2.3, 2.2)}
SAMPLED_SHARE = 0.85
TEMPERATURES = (0.0, 0.8)
# A verifier on a core of its own, nothing lent: what a tier on other machines has.
OWN_HARDWARE = {"verifier_threads": 1, "lend": False}


@dataclass(slots=True)
class Case:
    """One model at one temperature: decode seconds of each prompt, by way of decoding."""

    model: str
    temperature: float
    seconds: dict[str, dict[int, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    texts: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    num_tokens: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)

    def take(self, way: str, prompt: int, completion: Completion) -> None:
        """Takes in one completion."""
        self.seconds[way][prompt].append(completion.piece_times_s[-1] - completion.piece_times_s[0])
        self.texts[prompt].add(completion.text)
        self.num_tokens = completion.num_tokens - 1
        if way == SPECULATIVE:
            self.records.append(completion.record)

    def rate(self, way: str) -> float:
        """Decode tokens/s: all prompts, the median round of each."""
        seconds = sum(statistics.median(rounds) for rounds in self.seconds[way].values())
        return self.num_tokens * len(self.seconds[way]) / seconds

    def ratios(self, way: str, base: str) -> list[float]:
        """One way over another, all prompts, of each round."""
        rounds = [[sum(times) for times in zip(*self.seconds[each].values(), strict=True)] for each in (base, way)]
        return [its / mine for its, mine in zip(*rounds, strict=True)]

    @property
    def least(self) -> list[float]:
        """What is asked, on hardware of its own and on equal hardware."""
        share = 1.0 if self.temperature == 0 else SAMPLED_SHARE
        return [limit * share for limit in LEAST[self.model]]

    @property
    def is_known(self) -> bool:
        """Whether another round would say little."""
        own, equal = self.least
        better = max((self.ratios(way, ALL_CORES) for way in (SPECULATIVE, IN_TURN)), key=statistics.median)
        return is_known(self.ratios(SPECULATIVE, PLAIN), own) and is_known(better, equal)

    def total(self, key: str) -> int:
        """Sum of an entry of the speculation records."""
        return sum(int(record.get(key, 0)) for record in self.records)

    def figures(self) -> dict[str, Any]:
        """What goes into the table and the last line."""
        own, equal = (self.rate(SPECULATIVE) / self.rate(way) for way in (PLAIN, ALL_CORES))
        in_turn = self.rate(IN_TURN) / self.rate(ALL_CORES)
        ratios = self.ratios(SPECULATIVE, PLAIN)
        same_texts = all(len(texts) == 1 for texts in self.texts.values())
        return {
            "model": self.model,
            "temperature": self.temperature,
            "tokens_per_s": {way: round(self.rate(way), 1) for way in (PLAIN, SPECULATIVE, ALL_CORES, IN_TURN)},
            "own_hardware": round(own, 3),
            "equal_hardware": round(equal, 3),
            "equal_hardware_in_turn": round(in_turn, 3),
            "least": [round(limit, 3) for limit in self.least],
            "rounds": len(ratios),
            "error": round(standard_error(ratios), 3) if len(ratios) > 1 else None,
            "mean_acceptance_length": round(
                1 + self.total("num_accepted_draft_tokens") / max(1, self.total("num_spec_steps")), 2
            ),
            "gamma": round(self.total("num_draft_tokens") / max(1, self.total("num_spec_steps")), 2),
            "hit_rate": round(self.total("num_hits") / max(1, self.total("num_hits") + self.total("num_misses")), 3),
            "same_texts": same_texts,
            "ok": own >= self.least[0] and max(equal, in_turn) >= self.least[1] and same_texts,
        }


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = argparse.ArgumentParser(
        prog="single", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts (default 8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens per prompt (default 128)")
    parser.add_argument("--rounds", type=int, default=3, help="least times that each prompt is decoded (default 3)")
    parser.add_argument("--most-rounds", type=int, default=8, help="most times (default 8)")
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
        return [
            await _case(client, Case(model=model, temperature=temperature), ways, arguments)
            for temperature in TEMPERATURES
        ]


async def _case(
    client: aiohttp.ClientSession,
    case: Case,
    ways: dict[str, tuple[str, dict[str, bool]]],
    arguments: argparse.Namespace,
) -> Case:
    asks = [
        Ask(prompt=prompt, max_tokens=arguments.max_tokens, temperature=case.temperature, seed=seed)
        for seed, prompt in enumerate(unseen_prompts(arguments.prompts))
    ]
    await _warm_up(client, asks, ways)
    title = f"{case.model}, temperature {case.temperature:g}"
    rounds = range(max(arguments.rounds, arguments.most_rounds))
    with tqdm(total=len(rounds) * len(asks) * len(ways), desc=title, unit="completion", leave=False) as bar:
        for index in rounds:
            if index >= arguments.rounds and case.is_known:
                break
            for number, ask in enumerate(asks):
                for way, (url, speculation) in ways.items():
                    done = await complete(client, url, replace(ask, speculation=speculation))
                    if done.error:
                        raise RuntimeError(done.error)
                    case.take(way, number, done)
                    bar.update()
    return case


async def _warm_up(client: aiohttp.ClientSession, asks: Sequence[Ask], ways: dict[str, Any]) -> None:
    """Fills the prefix caches, and lets the controller meet the load."""
    for url, speculation in ways.values():
        for ask in asks:
            await complete(client, url, replace(ask, speculation=speculation, max_tokens=8))


if __name__ == "__main__":
    main()
