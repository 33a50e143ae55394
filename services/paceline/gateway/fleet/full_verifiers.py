"""Which verifiers have just said that a new session would wait too long there: they are not asked again at once.

A refusal costs the verifier and the gateway milliseconds that running sessions need, and under overload there are more
refusals than sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from paceline.core.errors import OverloadedError

# A verifier's word holds for so long at most. Its queue has more work than that, or it would not have refused.
MOST_S = 0.25


@dataclass(frozen=True, slots=True)
class _Word:
    """What a verifier said of a session that might wait `most_s` seconds (None: any), and until when it holds."""

    error: OverloadedError
    most_s: float | None
    until_s: float

    def holds_for(self, most_s: float | None, now_s: float) -> bool:
        """Whether it would say the same to a session that may wait so long."""
        if now_s >= self.until_s:
            return False
        return self.most_s is None or (most_s is not None and most_s <= self.most_s)


class ToldFull:
    """The words of all verifiers.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._words: dict[str, _Word] = {}

    def told(self, replica_id: str, error: OverloadedError, most_s: float | None) -> None:
        """A verifier has refused a session that might wait so long for a place; None: any time."""
        holds_s = min(MOST_S, error.retry_after_s)
        self._words[replica_id] = _Word(error, most_s, self._clock() + holds_s)

    def check(self, replica_ids: Iterable[str], most_s: float | None) -> None:
        """Refuses a session that all verifiers would refuse.

        Raises:
            OverloadedError: What one of them said last.
        """
        now_s, last = self._clock(), None
        for replica_id in replica_ids:
            last = self._words.get(replica_id)
            if last is None or not last.holds_for(most_s, now_s):
                return
        if last is not None:
            raise last.error

    def keep_only(self, replica_ids: Iterable[str]) -> None:
        """Forgets verifiers that are not there any more."""
        there = set(replica_ids)
        self._words = {replica_id: word for replica_id, word in self._words.items() if replica_id in there}
