"""How fast drafts come over one link, and so how long waiting for the next ones would take.

Time comes in as an argument; nothing here reads a clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paceline.core.patience import CHILD_SHARE

# Weight of a new observation.
SMOOTHING = 0.2
# Nodes are overdue after so many times the usual delay.
OVERDUE = 3.0
# Commits whose answers are kept track of; with more on their way at once there is nothing to wait for.
MOST_ASKED = 64
# Nodes that a drafter may have in a tree per node that may be verified in a step: for the branches that the text will
# not take.
ROOM_PER_NODE = 8
# Nothing is drafted for more steps ahead: one long silence would else have a drafter grow what nobody will verify.
MOST_STEPS_AHEAD = 4.0


def tree_room(cap: int, steps: float) -> int:
    """Nodes that a drafter may have in a session's tree when what it grows now is verified so many steps from now."""
    return round(ROOM_PER_NODE * cap * steps)


def price_ahead(price: float, steps: float) -> float:
    """Least survival worth drafting so many steps ahead: survival multiplies with every step, and 1 stays 1."""
    return float(price**steps)


@dataclass(slots=True)
class LinkPace:
    """Smoothed delays of one verifier-drafter link, in seconds.

    Args:
        response_s: From a commit to the first nodes of a drafter that knew it.
        interval_s: Between two messages with nodes of one session.
        silent: A response was overdue; nobody waits for this link until it is heard again.
        child_share: Survival that the best first guess after a commit has usually had: nobody waits for what is worth
            nothing.
    """

    response_s: float = 0.004
    interval_s: float = 0.002
    silent: bool = False
    child_share: float = CHILD_SHARE

    def heard_guess(self, survival: float) -> None:
        """The best first guess after a commit has this survival."""
        self.child_share += SMOOTHING * (survival - self.child_share)

    def heard_response(self, delay_s: float) -> None:
        """First nodes that know a commit took `delay_s`."""
        self.response_s += SMOOTHING * (delay_s - self.response_s)

    def heard_next(self, delay_s: float) -> None:
        """Further nodes of the same session took `delay_s`."""
        self.interval_s += SMOOTHING * (delay_s - self.interval_s)

    def steps_ahead(self, step_s: float) -> float:
        """Steps of so many seconds until one verifies what is drafted now: the next one, and those an answer takes."""
        return min(1.0 + self.response_s / step_s, MOST_STEPS_AHEAD)


class Answers:
    """Which commits a session's drafter has not answered yet; where the way is long, several are on it at once."""

    __slots__ = ("_asked", "_heard_s")

    def __init__(self) -> None:
        # Committed tokens, and when the drafter was told.
        self._asked: deque[tuple[int, float]] = deque(maxlen=MOST_ASKED)
        # When nodes last came from a drafter that knew of the last commit.
        self._heard_s: float | None = None

    def stop(self) -> None:
        """The drafter is at rest, or starts anew: no answers are to come."""
        self._asked.clear()
        self._heard_s = None

    def ask(self, committed_len: int, now_s: float) -> None:
        """The drafter is told of a commit."""
        self._asked.append((committed_len, now_s))
        self._heard_s = None

    def heard(self, base_len: int, now_s: float, pace: LinkPace) -> float | None:
        """Nodes came from a drafter that knew so many committed tokens; updates the link's pace.

        Returns:
            Seconds since that commit, for the first nodes that know it.
        """
        asked_len, asked_s = 0, 0.0
        while self._asked and self._asked[0][0] <= base_len:
            asked_len, asked_s = self._asked.popleft()
        heard_s = self._heard_s
        if not self._asked:
            self._heard_s = now_s
        if asked_len == base_len:
            delay_s = max(0.0, now_s - asked_s)
            pace.heard_response(delay_s)
            return delay_s
        if heard_s is not None:
            pace.heard_next(max(0.0, now_s - heard_s))
        return None

    def wait_s(self, now_s: float, pace: LinkPace) -> float | None:
        """Expected seconds until the next nodes: the answer to the oldest commit without one, or some beyond the last.

        Returns:
            A positive time; None when they are overdue, none are to come, or the link is silent.
        """
        if pace.silent:
            return None
        if self._heard_s is not None:
            return _left_s(now_s - self._heard_s, pace.interval_s)
        # A drafter whose tree was full had nothing to say to a commit.
        while len(self._asked) > 1 and now_s - self._asked[0][1] > OVERDUE * pace.response_s:
            self._asked.popleft()
        return _left_s(now_s - self._asked[0][1], pace.response_s) if self._asked else None

    def silences(self, now_s: float, pace: LinkPace) -> bool:
        """Marks the link as silent when an answer is overdue; says whether it was not before."""
        if pace.silent or not self._asked or now_s - self._asked[-1][1] <= OVERDUE * pace.response_s:
            return False
        pace.silent = True
        return True


def _left_s(elapsed_s: float, usual_s: float) -> float | None:
    return None if elapsed_s > OVERDUE * usual_s else max(usual_s - elapsed_s, 0.25 * usual_s)
