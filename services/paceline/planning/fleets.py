"""Large fleets by one of their cells, and the least fleet that meets a goal.

A cell has at least four verifiers if the fleet has, and their drafters. Sessions never leave the verifier they are
routed to, and requests are dealt out evenly, so all cells are alike: one of them stands for the fleet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planning.arrivals import Arrival
from paceline.planning.simulation import Outcome, PlannedFleet, Way, run_open
from paceline.simulated.profile import Profile

# Verifiers to a drafter that a search tries.
RATIOS = (1, 2, 4, 8)
# Share of the load's time that is left out at its beginning, while cells fill.
WARM_UP = 0.25
# A cell that has not answered everything this long after its last request, plus twice the time of the longest answer,
# never keeps up.
PATIENCE_S = 30.0
# A search ends when fleets this much smaller would not do.
TOLERANCE = 0.05
# A fleet that misses the goal is tried again this much larger, while a cell still gets this many requests.
GROWTH, LEAST_REQUESTS = 1.4, 8
P95 = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Most seconds of 95 of 100 requests to the first token, and of 95 of 100 tokens."""

    ttft_s: float
    itl_s: float

    def is_met(self, outcome: Outcome) -> bool:
        """Whether they get it, and everything was answered; a cell without requests shows nothing."""
        enough = outcome.ttft_s()[P95] <= self.ttft_s and outcome.itl_s()[P95] <= self.itl_s
        return enough and bool(outcome.counted) and outcome.num_unfinished == 0

    def patience_s(self, load: Sequence[Arrival]) -> float:
        """Seconds after the last request in which a cell that meets the goal has answered everything."""
        longest = max((each.num_output_tokens for each in load), default=0)
        return PATIENCE_S + self.ttft_s + 2.0 * self.itl_s * longest


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A fleet and what is expected of it, as its cell shows.

    Args:
        outcome: Outcome of a cell.
        offered_tokens_per_s: Tokens that the load asks of the whole fleet.
        meets: Whether the goals are met.
    """

    fleet: PlannedFleet
    profile: Profile
    outcome: Outcome
    offered_tokens_per_s: float
    meets: bool

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of the whole fleet: the load, or what its cells can do if that is less.

        The requests of one cell may be a little longer or shorter than those of the others, so a fleet that meets its
        goals is credited with the whole load.
        """
        able = self.outcome.tokens_per_s * self.fleet.num_verifiers / self.fleet.cell.num_verifiers
        return self.offered_tokens_per_s if self.meets else min(able, self.offered_tokens_per_s)

    @property
    def price_per_million_tokens(self) -> float:
        """Price of a million output tokens; infinite where there are none."""
        hourly = 3600.0 * self.tokens_per_s
        return 1e6 * self.fleet.price_per_hour(self.profile) / hourly if hourly else math.inf


def evaluate(profile: Profile, fleet: PlannedFleet, load: Sequence[Arrival], goal: Goal, *, seed: int = 0) -> Plan:
    """Simulates one cell of a fleet under its share of the load.

    Raises:
        ConfigError: A request is longer than the profile allows.
    """
    mine = dealt(load, fleet.cell.num_verifiers, fleet.num_verifiers)
    last_s = load[-1].at_s
    patience_s = goal.patience_s(mine)
    outcome = run_open(
        profile, fleet.cell, mine, until_s=last_s, warm_up_s=WARM_UP * last_s, give_up_s=patience_s, seed=seed
    )
    offered = sum(each.num_output_tokens for each in load) / max(last_s, 1e-9)
    return Plan(fleet=fleet, profile=profile, outcome=outcome, offered_tokens_per_s=offered, meets=goal.is_met(outcome))


def drafters_worth_trying(num_verifiers: int) -> list[int]:
    """Numbers of drafters for so many verifiers, by `RATIOS`, fewest first."""
    return sorted({max(1, num_verifiers // ratio) for ratio in RATIOS})


def dealt(load: Sequence[Arrival], share: int, of: int) -> list[Arrival]:
    """Every request that falls to `share` of `of` verifiers when they are dealt out in turn."""
    if share >= of:
        return list(load)
    return [each for index, each in enumerate(load) if index * share // of != (index + 1) * share // of]


def least_fleet(
    profile: Profile, way: Way, ratio: int = 1, *, load: Sequence[Arrival], goal: Goal, seed: int = 0
) -> Plan | None:
    """The smallest fleet that meets the goal, by growing and bisection; None when none of any size would.

    Args:
        ratio: Verifiers to a drafter, for a tier.
        load: Load of the fleet.
        goal: Goals that clients must get.
        seed: Seed of all random choices.
    """

    def of(num_verifiers: int) -> Plan:
        drafters = max(1, round(num_verifiers / ratio)) if way is Way.TIER else 0
        fleet = PlannedFleet(way=way, num_verifiers=num_verifiers, num_drafters=drafters)
        return evaluate(profile, fleet, load, goal, seed=seed)

    high = _least_verifiers(profile, load)
    low = high - 1
    best = of(high)
    while not best.meets:
        if len(best.outcome.requests) < LEAST_REQUESTS:
            return None
        low, high = high, math.ceil(GROWTH * high)
        best = of(high)
    while high - low > max(1, TOLERANCE * high):
        middle = (low + high) // 2
        tried = of(middle)
        low, high, best = (low, middle, tried) if tried.meets else (middle, high, best)
    return best


def _least_verifiers(profile: Profile, load: Sequence[Arrival]) -> int:
    """Verifiers that the load's prompts alone would keep busy: no fewer can do."""
    target = profile.target
    prompt_tokens = sum(each.num_prompt_tokens for each in load)
    rows_per_s = target.max_rows / target.step_s(target.max_rows, num_sessions=1)
    return max(1, math.ceil(prompt_tokens / rows_per_s / max(load[-1].at_s, 1e-9)))
