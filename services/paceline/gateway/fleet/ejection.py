"""Which verifiers get no sessions for a while: those that fail the sessions they get, and those that are full.

Pure but for the clock. A verifier that answers every session with an error at once is always the least loaded one, so
without ejection it would get them all. The rules are those of Envoy's outlier detection.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import OverloadedError
from paceline.store.base import Replica

# A verifier is ejected after this number of failures in a row, or once this share of its recent sessions failed, if
# there were at least `LEAST_OUTCOMES` of them within the window.
CONSECUTIVE = 3
SHARE = 0.5
LEAST_OUTCOMES = 10
WINDOW_S = 30.0
MAX_OUTCOMES = 256
# The first ejection; each later one is longer by the same time, up to the longest.
EJECTION_S = 5.0
LONGEST_S = 60.0
# If more than this share would be ejected, the fault lies elsewhere, and all of them stay in use.
PANIC_SHARE = 0.5
# A refusal holds for this long at most. The queue of a full verifier has more work than that.
FULL_S = 0.25


@dataclass(slots=True)
class _Outcomes:
    """How the sessions of one verifier ended.

    Attributes:
        recent: When each session ended, and whether the verifier failed it.
        num_consecutive: Failures since the last success.
        num_ejections: Of late.
        until_s: End of the last ejection.
    """

    recent: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=MAX_OUTCOMES))
    num_consecutive: int = 0
    num_ejections: int = 0
    until_s: float = 0.0

    def note(self, now_s: float, *, failed: bool) -> None:
        """Takes one outcome."""
        self.recent.append((now_s, failed))
        while self.recent[0][0] < now_s - WINDOW_S:
            self.recent.popleft()
        self.num_consecutive = self.num_consecutive + 1 if failed else 0
        if not any(each for _, each in self.recent):
            self.num_ejections = 0

    @property
    def is_outlier(self) -> bool:
        """Whether it fails too often."""
        num_failed = sum(failed for _, failed in self.recent)
        often = len(self.recent) >= LEAST_OUTCOMES and num_failed >= SHARE * len(self.recent)
        return self.num_consecutive >= CONSECUTIVE or often

    def eject(self, now_s: float) -> None:
        """Begins an ejection; counting starts again."""
        self.num_ejections += 1
        self.until_s = now_s + min(LONGEST_S, EJECTION_S * self.num_ejections)
        self.num_consecutive = 0
        self.recent.clear()


class Ejections:
    """The ejected verifiers of one gateway.

    Args:
        clock: Monotonic seconds.
        on_ejected: Called with the replica id when one is ejected.
    """

    def __init__(self, clock: Callable[[], float], on_ejected: Callable[[str], None] = lambda _: None) -> None:
        self._clock = clock
        self._on_ejected = on_ejected
        self._outcomes: dict[str, _Outcomes] = {}

    def served(self, replica_id: str) -> None:
        """A verifier brought a session to its end, or to its next token."""
        known = self._outcomes.get(replica_id)
        if known is not None:
            known.note(self._clock(), failed=False)

    def failed(self, replica_id: str) -> None:
        """A verifier failed a session, and the session was not to blame."""
        now_s = self._clock()
        outcomes = self._outcomes.setdefault(replica_id, _Outcomes())
        outcomes.note(now_s, failed=True)
        if outcomes.is_outlier and now_s >= outcomes.until_s:
            outcomes.eject(now_s)
            self._on_ejected(replica_id)

    def keep_only(self, replicas: Sequence[Replica]) -> None:
        """Forgets verifiers that have left."""
        present = {each.replica_id for each in replicas}
        self._outcomes = {name: each for name, each in self._outcomes.items() if name in present}

    def without(self, able: Sequence[Replica]) -> list[Replica]:
        """Returns the verifiers that are not ejected; all of them where too many are."""
        now_s = self._clock()
        left = [each for each in able if not self._is_ejected(each.replica_id, now_s)]
        return left if len(able) - len(left) <= PANIC_SHARE * len(able) else list(able)

    def _is_ejected(self, replica_id: str, now_s: float) -> bool:
        outcomes = self._outcomes.get(replica_id)
        return outcomes is not None and now_s < outcomes.until_s


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A verifier's refusal of a session that could wait `max_wait_s` seconds, and until when it holds."""

    error: OverloadedError
    max_wait_s: float
    until_s: float


class FullVerifiers:
    """Verifiers that have just refused a session because it would wait too long for a place.

    They are not asked again at once: a refusal costs the verifier and the gateway milliseconds that running sessions
    need, and under overload there are more refusals than sessions.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._refusals: dict[str, _Refusal] = {}

    def refused(self, replica_id: str, error: OverloadedError, max_wait_s: float) -> None:
        """A verifier has refused a session that could wait `max_wait_s` seconds for a place."""
        holds_s = min(FULL_S, error.retry_after_s)
        self._refusals[replica_id] = _Refusal(error, max_wait_s, self._clock() + holds_s)

    def check(self, replica_ids: Iterable[str], max_wait_s: float) -> None:
        """Refuses a session that all these verifiers would refuse.

        Raises:
            OverloadedError: The error of one of them.
        """
        now_s, last = self._clock(), None
        for replica_id in replica_ids:
            last = self._refusals.get(replica_id)
            if last is None or now_s >= last.until_s or max_wait_s > last.max_wait_s:
                return
        if last is not None:
            raise last.error

    def keep_only(self, replicas: Sequence[Replica]) -> None:
        """Forgets verifiers that have left."""
        present = {each.replica_id for each in replicas}
        self._refusals = {name: each for name, each in self._refusals.items() if name in present}
