"""What sessions usually have in hand, survivals by rank: drafters work ahead of the step, so the price looks ahead too.

Each session has a record of its own. One that look-up serves well would otherwise have its successor decode without a
drafter, or with one whose price is for better guesses than it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.core.goodput import Floats

# What the first session is taken to have: survival of the k-th best node. Modest, so that a fleet which knows nothing
# calls drafters only where even such guesses are worth it.
FIRST_SURVIVAL, DECLINE = 0.5, 0.8
# Weight of a look at a session in its own record.
SMOOTHING = 0.2
# Looks that the usual record stands for, at first and at most, and the share of them that is forgotten with each look
# at which there was nothing to be seen.
FIRST_LOOKS, MOST_LOOKS, FORGETTING = 4.0, 50.0, 0.01


@dataclass(slots=True)
class Record:
    """Survivals that one session usually has, best first, `[ranks]`; None before they were looked at."""

    survivals: Floats | None = None


@dataclass(slots=True)
class SessionSurvivals:
    """What one session usually has in hand.

    Attributes:
        in_hand: While its drafter works.
        own: Of guesses that it has without a drafter.
        tries: Whether it drafts so that what drafters bring is known, while others do not.
    """

    in_hand: Record = field(default_factory=Record)
    own: Record = field(default_factory=Record)
    tries: bool = False


class UsualSurvivals:
    """Survivals by rank that sessions usually have, and that a new session is taken to have.

    Args:
        first: `[ranks]`, before any session was seen.

    Attributes:
        typical: `[ranks]`, of sessions so far.
        num_looks: For how many of the last looks it stands.
    """

    def __init__(self, first: Floats) -> None:
        self.typical = first.copy()
        self.num_looks = FIRST_LOOKS

    def learned(self) -> list[float]:
        """What a session is taken to have; see `resume`."""
        return [float(each) for each in self.typical]

    def resume(self, typical: Sequence[float]) -> None:
        """Begins with what a predecessor has learned; a few looks are enough to change it, since drafters change too.

        Raises:
            ValueError: These are not survivals of that number of ranks.
        """
        known = np.asarray(typical, dtype=np.float64)
        if known.shape != self.typical.shape or not np.all((known >= 0.0) & (known <= 1.0)):
            raise ValueError(f"needs {len(self.typical)} survivals from 0 to 1, got {known.shape}")
        self.typical = known

    def of_all(self, records: Sequence[Record], num_sessions: int) -> Floats:
        """What `num_sessions` sessions like these have, best first, `[num_sessions * ranks]`.

        All of a rank count as their mean: sorted by size, records that err on the high side would come first.
        """
        known = self._known(records)
        return np.repeat(known.sum(axis=0) / len(known), num_sessions) if len(known) else np.empty(0)

    def see(self, records: Sequence[Record], looks: Sequence[Sequence[float] | Floats]) -> None:
        """Looks at what each session has, best first; ranks it does not have count as 0."""
        if not records:
            return
        known = self._known(records)
        seen = np.zeros_like(known)
        for row, look in zip(seen, looks, strict=True):
            row[: len(look)] = look[: len(row)]
        num_looks = self.num_looks + len(seen)
        self.typical += (seen.sum(axis=0) - len(seen) * self.typical) / num_looks
        self.num_looks = min(num_looks, MOST_LOOKS)
        for record, survivals in zip(records, known + SMOOTHING * (seen - known), strict=True):
            record.survivals = survivals

    def forget(self, records: Sequence[Record]) -> None:
        """There was nothing to be seen: the next look counts for more, and sessions are like the others again."""
        if records:
            self.num_looks -= FORGETTING * self.num_looks
        for record in records:
            if record.survivals is not None:
                record.survivals = record.survivals + SMOOTHING * (self.typical - record.survivals)

    def _known(self, records: Sequence[Record]) -> Floats:
        known = [self.typical if each.survivals is None else each.survivals for each in records]
        return np.array(known).reshape(len(known), len(self.typical))


def first_survivals(max_nodes: int) -> Floats:
    """What a session is taken to have in hand before any was seen, `[max_nodes]`."""
    return FIRST_SURVIVAL * np.power(DECLINE, np.arange(max_nodes, dtype=np.float64))
