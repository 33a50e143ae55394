"""What a profile promises: tokens a second at several loads, plain and with a drafter, and which pays where."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.planning.report import markdown
from paceline.planning.simulation import Fleet, Outcome, Way, run_closed
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


def tokens_of(number: int, mean: int) -> int:
    """Length of a text: half to one and a half times the mean, so that texts do not begin and end in lockstep."""
    return random.Random(number).randint(mean // 2, mean * 3 // 2)


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
        seconds: That are simulated for one stream; many streams show as much in fewer, down to `LEAST_S`.
        seed: Of the luck with step times.
    """

    def lengths() -> Iterator[tuple[int, int]]:
        for number in itertools.count():
            yield PROMPT_TOKENS, tokens_of(number, mean_tokens)

    fleet = Fleet(way=way, num_drafters=int(way is Way.TIER))
    until_s = max(LEAST_S, seconds / streams)
    return run_closed(
        profile, fleet, lengths(), streams=streams, warm_up_s=SETTLING * until_s, until_s=until_s, seed=seed
    )


def loads_of(profile: Profile) -> list[int]:
    """Loads that its target can hold."""
    return [each for each in LOADS if each <= profile.target.max_sessions]


@dataclass(frozen=True, slots=True)
class Promise:
    """Tokens/s of every way at a load."""

    streams: int
    rates: Mapping[Way, float]

    @property
    def best(self) -> Way:
        """The way that pays: the fastest, unless it is hardly faster than plain decoding."""
        fastest = max(self.rates, key=self.rates.__getitem__)
        return fastest if self.gain(fastest) >= LEAST_GAIN else Way.PLAIN

    def gain(self, way: Way) -> float:
        """How many times as fast as plain decoding."""
        return self.rates[way] / self.rates[Way.PLAIN]

    def figures(self) -> dict[str, object]:
        rates = {way.value: round(rate, 1) for way, rate in self.rates.items()}
        return {"streams": self.streams, "tokens_per_s": rates, "best": self.best.value}

    def row(self) -> tuple[str, ...]:
        gains = [f"{rate:,.0f} ({self.gain(way):.2f}x)" for way, rate in self.rates.items() if way is not Way.PLAIN]
        return f"{self.streams:,}", f"{self.rates[Way.PLAIN]:,.0f}", *gains, self.best.value


def shown(profile: Profile, promises: Sequence[Promise]) -> str:
    """All of it, for somebody who reads it for the first time."""
    gpus = {way: Fleet(way=way, num_drafters=int(way is Way.TIER)).num_gpus(profile) for way in Way}
    titles = [f"{way.value}, {count} GPU{'s' if count > 1 else ''}" for way, count in gpus.items()]
    return (
        f"{paces(profile)}\n"
        "Tokens/s of one verifier that always has so many streams, with texts of "
        f"{MEAN_TOKENS} tokens on average;\nin brackets, how many times as fast as without speculation.\n\n"
        + markdown([("streams", *titles, "what pays"), *(each.row() for each in promises)])
        + "\n"
    )


def paces(profile: Profile) -> str:
    """What steps take, and whether the drafter is fast enough."""
    step_s, draft_s, inside_s = (
        each.step_s(1, num_sessions=1) for each in (profile.target, profile.drafter, profile.colocated)
    )
    share = draft_s / step_s
    slow = f"\n{profile.drafter.name} is too slow for this drafter: a draft step should take a tenth of the target's."
    return (
        f"A step takes {1e3 * step_s:.1f} ms; a draft step takes {1e3 * draft_s:.1f} ms on a device of its own "
        f"({share:.2f} of it), and {1e3 * inside_s:.1f} ms inside the verifier.{slow if share > SLOW else ''}"
    )
