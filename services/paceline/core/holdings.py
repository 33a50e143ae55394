"""What sessions usually have in hand, survivals by rank: drafters work ahead of the step, so the price looks ahead too.

Each session has a record of its own. One that look-up serves well would otherwise have its successor decode without a
drafter, or with one that was told a price for better guesses than it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# What the first session is taken to have: survival of the k-th best node.
FIRST_SURVIVAL, DECLINE = 0.7, 0.8
# Weight of a look at a session in its own record, in that of all, and of what no session was seen with.
SMOOTHING, TYPICAL_SMOOTHING, FORGETTING = 0.2, 0.02, 0.002


@dataclass(slots=True)
class Holdings:
    """One session's record; empty until its first step.

    Attributes:
        in_hand: Survivals while its drafter works, best first, `[ranks]`.
        own: Of guesses that it has without a drafter.
    """

    in_hand: Floats | None = None
    own: Floats | None = None


class Usual:
    """Survivals by rank that sessions usually have, and that a new session is taken to have.

    Args:
        first: `[ranks]`, before any session was seen.
    """

    def __init__(self, first: Floats) -> None:
        self._first = first
        self._typical = first.copy()

    def of(self, records: Sequence[Floats | None]) -> Floats:
        """The records, `[sessions, ranks]`, where there are none those of a typical session."""
        known = [self._typical if each is None else each for each in records]
        return np.array(known).reshape(len(known), len(self._first))

    def see(self, records: Floats, looks: Sequence[Sequence[float]]) -> Floats:
        """The records after a look at what each session has, best first; ranks it does not have count as 0."""
        seen = np.zeros_like(records)
        for row, look in zip(seen, looks, strict=True):
            row[: len(look)] = look[: len(row)]
        if len(seen):
            weight = 1.0 - (1.0 - TYPICAL_SMOOTHING) ** len(seen)
            self._typical += weight * (seen.sum(axis=0) / len(seen) - self._typical)
        return records + SMOOTHING * (seen - records)

    def forget(self, records: Floats) -> Floats:
        """The records after a step in which there was nothing to be seen: slowly those of the beginning."""
        self._typical += FORGETTING * (self._first - self._typical)
        return records + FORGETTING * (self._first - records)


def first_holdings(max_nodes: int) -> Floats:
    """What a session is taken to have in hand before any was seen, `[max_nodes]`."""
    return FIRST_SURVIVAL * np.power(DECLINE, np.arange(max_nodes, dtype=np.float64))
