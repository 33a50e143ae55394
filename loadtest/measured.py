"""Turns at decoding, with what the verifier's metrics say of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from loadtest.client import Ask, BatchResult, Completions, joined, run_batch
from loadtest.scrape import MeanOf, scrape
from loadtest.trial import Trial

# Tokens decoded untimed after each change: the verifier has to learn how long answers take now.
SETTLE_TOKENS = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn.

    Attributes:
        result: What came back.
        tokens_per_s: Decoding only at one stream, all output over the whole time at more.
        before, after: The verifier's metrics around it.
    """

    result: BatchResult
    tokens_per_s: float
    before: Mapping[str, float]
    after: Mapping[str, float]


async def settled_turn(url: str, metrics: str, asks: Sequence[Ask], streams: int, title: str) -> Turn:
    """Lets the fleet behind a gateway settle, then times the requests; `metrics` is the address of its verifier's."""
    await run_batch(url, [replace(asks[0], max_tokens=SETTLE_TOKENS)], 1, f"{title}, settling")
    before = await scrape(metrics)
    result = await run_batch(url, asks, streams, title)
    speed = result.decode_tokens_per_s if streams == 1 else result.tokens_per_s
    return Turn(result=result, tokens_per_s=speed, before=before, after=await scrape(metrics))


@dataclass(frozen=True, slots=True)
class Measured:
    """All turns of one side, one a round."""

    turns: Sequence[Turn]

    @property
    def completions(self) -> Completions:
        """What came back in all turns."""
        return joined(turn.result for turn in self.turns)

    @property
    def speeds(self) -> list[float]:
        """Tokens/s of each turn."""
        return [turn.tokens_per_s for turn in self.turns]

    @property
    def tokens_per_s(self) -> float:
        """Median of the turns."""
        return statistics.median(self.speeds)

    def over(self, base: Measured) -> Trial:
        """This side's speed over another's."""
        return Trial.of(self.speeds, base.speeds)

    def mean_ms(self, histogram: str) -> float:
        """Mean of a histogram of seconds over all turns, in milliseconds; 0 when nothing was observed."""
        mean = MeanOf(histogram)
        for turn in self.turns:
            mean.add(turn.before, turn.after)
        return 1e3 * mean.value
