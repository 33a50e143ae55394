"""A profile from what a rehearsal has shown: of a verifier's steps, of its drafter's, and of what guesses are worth.

What no verifier can know is left at its default: prices, KV that steps read, a drafter's pages and flags. A drafter
inside the verifier is taken to be as fast as that of the tier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from paceline.core.messages import Drafts
from paceline.engine.rehearsing import Take
from paceline.engine.target import TIER
from paceline.forest import UNLEARNED
from paceline.forest.tree_loops import margin
from paceline.simulated.guesses import DrawnGuesses
from paceline.simulated.profile import MEASURED, DeviceFacts, DrafterFacts, Profile

# To a drafter, where it was not measured.
LINK_S = 0.0002
# Of the times between two messages of a drafter; in longer ones it also waits.
AT_WORK = 0.25
# Between two messages that a drafter sent at once.
AT_ONCE_S = 1e-5

# Seconds by rows.
Times = Mapping[int, Sequence[float]]


def measured_profile(
    takes: Sequence[Take],
    calibrations: Mapping[str, Sequence[float]],
    *,
    name: str,
    kv_tokens: int,
    max_rows: int,
    round_trip_s: float | None = None,
) -> Profile | None:
    """What a verifier has measured; None where no drafter has answered.

    Args:
        takes: All of a rehearsal.
        calibrations: What it has learned of its drafter.
        kv_tokens: Tokens that its pages hold.
        max_rows: Of a step.
        round_trip_s: To the drafter and back, without its work; None: not known.
    """
    plain = _times(step for take in takes if not take.drafts for step in take.steps)
    target: dict[str, Any] = _table(plain)
    draft_steps = _draft_steps(takes)
    confidences = [each for take in takes for _, drafts in take.arrived for each in _best_confidences(drafts)]
    if not draft_steps or not confidences:
        return None
    drafter = DrafterFacts(name="drafter", **_table(draft_steps))
    drafting = np.array([step for take in takes if take.drafts for step in take.steps])
    ratios = drafting[:, 1] / np.interp(drafting[:, 0], target["rows"], target["seconds"])
    target |= {"max_sessions": max(take.load for take in takes), "max_rows": max_rows}
    return Profile(
        name=name,
        kind=MEASURED,
        origin="a rehearsal",
        target=DeviceFacts(name="verifier", noise=_noise(plain), kv_tokens=kv_tokens, **target),
        drafter=drafter,
        colocated=drafter,
        colocated_kv_tokens=kv_tokens,
        drafting_overhead=max(0.0, float(np.median(ratios)) - 1.0),
        truth=_law(confidences, calibrations),
        link_s=LINK_S if round_trip_s is None else round_trip_s / 2.0,
    )


def _times(steps: Iterable[tuple[int, float]]) -> Times:
    found = defaultdict[int, list[float]](list)
    for rows, seconds in steps:
        found[rows].append(seconds)
    return found


def _table(times: Times) -> dict[str, Any]:
    """Rows and seconds as devices have them: at least two, and never decreasing."""
    rows = sorted(times)
    seconds = np.maximum.accumulate([float(np.median(times[each])) for each in rows]).tolist()
    if len(rows) == 1:
        rows, seconds = [*rows, rows[0] + 1], [*seconds, *seconds]
    return {"rows": tuple(rows), "seconds": tuple(seconds)}


def _noise(times: Times) -> float:
    """Standard deviation of the logarithm of a step's time, of steps that were seen often enough."""
    spreads = [float(np.std(np.log(each))) for each in times.values() if len(each) > 4]
    return float(np.median(spreads)) if spreads else 0.0


def _draft_steps(takes: Sequence[Take]) -> Times:
    """Seconds that a drafter takes for a level of guesses, by its rows, one for each load.

    A message holds one level or several, each below the one before; while a drafter has work, it sends one after the
    other.
    """
    found = defaultdict[int, list[float]](list)
    for take in filter(attrgetter("drafts"), takes):
        bursts = [_burst(arrived) for arrived in _at_once(take.arrived)]
        levels, rows = sum(each[1] for each in bursts), sum(each[2] for each in bursts)
        gaps = [(after[0] - before[0]) / after[1] for before, after in pairwise(bursts)]
        if gaps:
            found[max(1, round(rows / levels))].append(float(np.quantile(gaps, AT_WORK)))
    return found


def _at_once(arrived: Sequence[tuple[float, Drafts]]) -> list[list[tuple[float, Drafts]]]:
    """Messages that came together."""
    return [list(each) for _, each in groupby(arrived, key=lambda one: round(one[0] / AT_ONCE_S))]


def _burst(arrived: Sequence[tuple[float, Drafts]]) -> tuple[float, int, int]:
    """When it came, its levels, and the rows that gave them."""
    places = [_levels(drafts) for _, drafts in arrived]
    return arrived[0][0], sum(map(itemgetter(0), places)), sum(map(itemgetter(1), places))


def _levels(drafts: Drafts) -> tuple[int, int]:
    """Levels of guesses in a message, and nodes that these hang below."""
    most, num_parents, start = 1, 0, 0
    for end in drafts.ends.tolist():
        depths = dict[int, int]()
        parents = drafts.parent_ids[start:end].tolist()
        for node, parent in zip(drafts.ids[start:end].tolist(), parents, strict=True):
            depths[node] = depths.get(parent, 0) + 1
        most, num_parents, start = max(most, *depths.values(), 1), num_parents + len({*parents}), end
    return most, num_parents


def _best_confidences(drafts: Drafts) -> list[float]:
    """How sure the drafter was of the best guess below each node."""
    best, start = list[float](), 0
    for end in drafts.ends.tolist():
        below = dict[int, float]()
        pairs = zip(drafts.parent_ids[start:end].tolist(), drafts.confidences[start:end].tolist(), strict=True)
        for parent, confidence in pairs:
            below[parent] = max(confidence, below.get(parent, 0.0))
        best, start = [*best, *below.values()], end
    return best


def _law(confidences: Sequence[float], calibrations: Mapping[str, Sequence[float]]) -> DrawnGuesses:
    """By the surest of what was learned of drafters, greedy or not."""
    odds = [margin(each) for each in confidences]
    known = [each for kind, each in calibrations.items() if TIER in kind.split()]
    slope, intercept, *_ = min(known, key=itemgetter(2), default=UNLEARNED)
    return DrawnGuesses(
        slope=slope, intercept=intercept, confidence_mean=float(np.mean(odds)), confidence_spread=float(np.std(odds))
    )
