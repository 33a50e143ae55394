"""Speculative against plain decoding at 1 to 64 streams, with one configuration: `make bench NAME=concurrency`.

A verifier on one core and its drafter on the other, as on machines of their own; nothing is tuned between the loads.
At every load three ways take turns: plain (speculation disabled by the requests), speculative, and a fleet that has no
drafter at all and the same one core for its verifier, which shows what speculation costs when it is merely configured.
Requests of half to one and a half times --max-tokens keep all streams busy: plain ones of equal length would start and
end in lockstep, as no traffic does. Their prompts are cached. Tokens/s over all streams while all are busy, medians of
the rounds. Ratios are medians of ratios within a round, and met within their standard error; rounds go on until these
are known to one percent or lie three standard errors from their goals, on either side, or there were --most-rounds.

With --vocab 151936 both models have as many ids as Qwen's, with --top-p and --top-k requests choose as users do; what
choosing costs shows there and not with the 4,096 ids of the demo pair.

With --small the target is the demo pair's as shipped, whose steps take 3 ms: there everything around the step counts.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from loadtest.bench import Table, add_choice_flags, add_round_flags, bench_parser, report, run, sampling_of
from loadtest.client import BatchResult, joined, run_batch, same_texts
from loadtest.fleet import DEMO_PAIR, OWN_HARDWARE, bench_fleet, widened_target
from loadtest.streams import Ask
from loadtest.trial import Trial, rounded_error, take_turns
from loadtest.vocabulary import with_vocabulary
from paceline.checkpoints.corpus import unseen_prompts

PLAIN, SPECULATIVE, NO_DRAFTER = "plain", "speculative", "no drafter"
LOADS = (1, 2, 4, 8, 16, 32, 64)
# Never slower, anywhere; and faster by this much up to that number of streams.
LEAST, LEAST_AT_FEW, FEW = 0.98, 1.2, 4
NUM_PROMPTS = 64
REQUESTS_PER_STREAM = 4
# Where a way's requests go, and what they ask of speculation.
Ways = Mapping[str, tuple[str, Mapping[str, bool]]]


@dataclass(frozen=True, slots=True)
class Row:
    """A load: results of each way of decoding, one a round."""

    streams: int
    results: Mapping[str, Sequence[BatchResult]]

    def speeds(self, way: str) -> list[float]:
        """Tokens/s of each round."""
        return [result.busy_tokens_per_s for result in self.results[way]]

    def trial(self, base: str) -> Trial:
        """Speculative decoding over another way."""
        return Trial.of(self.speeds(SPECULATIVE), self.speeds(base))

    @property
    def least(self) -> float:
        """The goal of both ratios."""
        return LEAST_AT_FEW if self.streams <= FEW else LEAST

    @property
    def is_known(self) -> bool:
        """Whether another round would change little."""
        return all(self.trial(base).is_known(self.least) for base in (PLAIN, NO_DRAFTER))

    def figures(self) -> dict[str, Any]:
        """Figures for the table and the last line."""
        speculative = joined(self.results[SPECULATIVE])
        to_plain, to_none = self.trial(PLAIN), self.trial(NO_DRAFTER)
        same = same_texts(itertools.chain.from_iterable(self.results.values()))
        return {
            "streams": self.streams,
            "tokens_per_s": {way: round(statistics.median(self.speeds(way)), 1) for way in self.results},
            "ratio": round(to_plain.ratio, 3),
            "to_no_drafter": round(to_none.ratio, 3),
            "error": rounded_error(to_plain, to_none),
            "rounds": len(to_plain.ratios),
            "batch": {
                way: round(statistics.median(each.mean_batch_size for each in results), 1)
                for way, results in self.results.items()
            },
            "gamma": round(speculative.per("num_draft_tokens", "num_steps"), 2),
            "tokens_per_step": round(1 + speculative.per("num_accepted_draft_tokens", "num_steps"), 2),
            "same_texts": same,
            "ok": to_plain.meets(least=self.least) and to_none.meets(least=self.least) and same,
        }


def main() -> None:
    """Parses the command line and runs the bench."""
    parser = bench_parser("concurrency", __doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=LOADS, help="loads (default 1 2 4 ... 64)")
    add_round_flags(parser, 3, 8)
    parser.add_argument("--max-tokens", type=int, default=64, help="mean tokens of a request (default 64)")
    parser.add_argument("--small", action="store_true", help="the demo target as shipped, not widened to 98 M")
    add_choice_flags(parser)
    run(parser, measure)


async def measure(arguments: argparse.Namespace) -> bool:
    """Measures all loads and prints the table; True when every ratio is met."""
    settings = DEMO_PAIR if arguments.small else widened_target("98m")
    settings = with_vocabulary(settings, arguments.vocab)
    core = ("--cpus", str(min(os.sched_getaffinity(0))))
    table, rows = Table(), []
    async with (
        bench_fleet(**settings, **OWN_HARDWARE) as fleet,
        bench_fleet(**settings, drafter=False, verifier_threads=1, verifier_arg=core) as alone,
    ):
        ways: Ways = {
            PLAIN: (fleet.gateway_url, {"enabled": False}),
            SPECULATIVE: (fleet.gateway_url, {"enabled": True}),
            NO_DRAFTER: (alone.gateway_url, {"enabled": False}),
        }
        for way in ways:
            # Fills the prefix caches.
            await _run(ways, way, [replace(ask, max_tokens=2) for ask in _asks(NUM_PROMPTS, 2)], 8)
        for streams in tqdm(arguments.streams, desc="loads", unit="load", leave=False):
            rows.append((await _row(ways, streams, arguments)).figures())
            table.add(rows[-1])
    print(
        f"tokens/s, {arguments.max_tokens} tokens a request on average, temperature {arguments.temperature:g}, "
        f"top-p {arguments.top_p:g}, top-k {arguments.top_k}; "
        "batch: sessions in a step, gamma: draft tokens of each"
    )
    target = ("demo" if arguments.small else "98m") + (f", {arguments.vocab} ids" if arguments.vocab else "")
    return report("concurrency", target=target, loads=rows, ok=all(row["ok"] for row in rows))


def _asks(count: int, max_tokens: int, **sampling: float) -> list[Ask]:
    prompts = itertools.islice(itertools.cycle(unseen_prompts(NUM_PROMPTS)), count)
    lengths = random.Random(0)
    low, high = max_tokens // 2, max_tokens + max_tokens // 2
    return [
        Ask(prompt=prompt, max_tokens=lengths.randint(low, high), seed=seed, more=sampling)
        for seed, prompt in enumerate(prompts)
    ]


async def _run(ways: Ways, way: str, asks: Sequence[Ask], streams: int) -> BatchResult:
    url, speculation = ways[way]
    batch = [replace(ask, speculation=speculation) for ask in asks]
    return await run_batch(url, batch, streams, f"{way}, {streams} streams")


async def _row(ways: Ways, streams: int, arguments: argparse.Namespace) -> Row:
    asks = _asks(max(8, REQUESTS_PER_STREAM * streams), arguments.max_tokens, **sampling_of(arguments))
    results = await take_turns(
        list(ways),
        lambda way: _run(ways, way, asks, streams),
        rounds=arguments.rounds,
        most_rounds=arguments.most_rounds,
        is_known=lambda results: Row(streams, results).is_known,
        title=f"{streams} streams",
    )
    return Row(streams, results)
