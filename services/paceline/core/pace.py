"""How fast drafts come over one link, and so how long waiting for the next ones would take.

A session that a commit left without drafts is in one of two cases: those it needs are on their way, or its drafter had
none and has to hear of the commit first. Which one it is shows in the time that has passed: so the last delays are kept
one by one, and those that are over by now say nothing of what is still to come.

Time comes in as an argument; nothing here reads a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.core.patience import CHILD_SHARE, Wait

# Weight of a new observation.
SMOOTHING = 0.2
# Delays that are kept of a kind; and what is expected before there are any.
MOST_DELAYS = 24
FIRST_RESPONSES_S, FIRST_INTERVALS_S = (0.004, 0.008, 0.016), (0.002, 0.004)
# Delays that have so little to run are over: clocks have no finer word of it.
LEAST_WAIT_S = 50e-6
# A response is overdue after so many times the longest delay.
OVERDUE = 3.0


class Delays:
    """The last delays of one kind, in seconds.

    Args:
        first_s: What is expected before there are any, at least one.
    """

    def __init__(self, first_s: Sequence[float]) -> None:
        self._last = deque(first_s, MOST_DELAYS)
        self._sorted = sorted(self._last)

    @property
    def longest_s(self) -> float:
        """The longest one."""
        return self._sorted[-1]

    def observe(self, delay_s: float) -> None:
        """Takes in one more, and forgets the oldest."""
        self._last.append(delay_s)
        self._sorted = sorted(self._last)

    def wait(self, elapsed_s: float) -> Wait | None:
        """The wait for what has not come for `elapsed_s`; None when it always came sooner.

        Of all times to give up it is the one for which an arrival costs least: with delays `d` that are still to come,
        giving up after `t` costs a mean of `min(d, t)`, and it arrives as often as `d <= t`.
        """
        left = self._sorted[bisect_right(self._sorted, elapsed_s + LEAST_WAIT_S) :]
        passed_s, least_s = 0.0, math.inf
        for index, delay_s in enumerate(left):
            passed_s += delay_s - elapsed_s
            cost_s = (passed_s + (len(left) - index - 1) * (delay_s - elapsed_s)) / (index + 1)
            if cost_s <= least_s:
                least_s, longest_s = cost_s, delay_s - elapsed_s
        return Wait(least_s, longest_s) if left else None


@dataclass(slots=True)
class LinkPace:
    """Delays of one verifier-drafter link.

    Args:
        responses: From a commit that left a session without drafts to the first ones.
        intervals: From a commit that left it some, or from the last that came, to the next ones.
        silent: A response was overdue; nobody waits for this link until it is heard again.
        heard_s: When anything came over it last.
        child_share: Survival that the best first guess after a commit has usually had: nobody waits for what is worth
            nothing.
    """

    responses: Delays = field(default_factory=lambda: Delays(FIRST_RESPONSES_S))
    intervals: Delays = field(default_factory=lambda: Delays(FIRST_INTERVALS_S))
    silent: bool = False
    heard_s: float = -math.inf
    child_share: float = CHILD_SHARE

    def heard(self, now_s: float) -> None:
        """Something came over the link, of use or not."""
        self.silent, self.heard_s = False, now_s

    def heard_guess(self, survival: float) -> None:
        """The best first guess after a commit has this survival."""
        self.child_share += SMOOTHING * (survival - self.child_share)


class DraftClock:
    """When a session ran out of drafts, when its drafter was told of the last commit, and when drafts last came."""

    __slots__ = ("_empty_since_s", "_heard_s", "_told_s")

    def __init__(self) -> None:
        # Of the first commit after which it had no drafts; None: it has some, or its drafter rests.
        self._empty_since_s: float | None = None
        self._told_s: float | None = None
        self._heard_s = -math.inf

    def stop(self) -> None:
        """Its drafter is not expected to draft."""
        self._empty_since_s = self._told_s = None

    def told(self, now_s: float, *, has_drafts: bool) -> None:
        """Its drafter is told of a commit, which left it drafts or did not."""
        self._told_s = now_s
        if has_drafts:
            self._empty_since_s = None
        elif self._empty_since_s is None:
            self._empty_since_s = now_s

    def heard(self, now_s: float, pace: LinkPace, *, has_drafts: bool) -> bool:
        """Nodes came, and the session has drafts or still has none; says whether they ended a time without."""
        told_s, empty_since_s = self._told_s, self._empty_since_s
        if told_s is None:
            return False
        last_s, self._heard_s = max(told_s, self._heard_s), now_s
        if empty_since_s is None:
            delays, since_s = pace.intervals, last_s
        elif has_drafts:
            delays, since_s = pace.responses, empty_since_s
        else:
            return False
        # What came during the step whose commit asked for it was there at once.
        if now_s > since_s:
            delays.observe(now_s - since_s)
        self._empty_since_s = None
        return empty_since_s is not None

    def wait(self, now_s: float, pace: LinkPace) -> Wait | None:
        """The wait for its next nodes; None when they always came sooner, or the link is silent."""
        if pace.silent or self._told_s is None:
            return None
        if self._empty_since_s is None:
            return pace.intervals.wait(now_s - max(self._told_s, self._heard_s))
        # When what the first commit without drafts asked for is not to come any more, the last one has asked as well.
        return pace.responses.wait(now_s - self._empty_since_s) or pace.responses.wait(now_s - self._told_s)

    def silences(self, now_s: float, pace: LinkPace) -> bool:
        """Marks the link as silent when a response is overdue; says whether it was not before."""
        if pace.silent or self._empty_since_s is None:
            return False
        if now_s - max(self._empty_since_s, pace.heard_s) <= OVERDUE * pace.responses.longest_s:
            return False
        pace.silent = True
        return True
