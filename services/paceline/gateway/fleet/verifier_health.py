"""Health of each verifier from this gateway's calls: out of reach, failing its sessions, or full.

Pure but for the clock. A verifier that answers every session with an error at once is always the least loaded one, so
without ejection it would get them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paceline.core.errors import OverloadedError
from paceline.store.base import Replica

# A failure adds so much to a verifier's score, a session that it serves takes 1 off: three failures in a row eject it,
# and so do ten sessions of which every second one fails. It comes back on probation: its next failure ejects it again.
FAILURE, EJECTED = 2, 6
# The first ejection; each later one is longer by the same time, up to the longest, until the score is 0.
EJECTION_S, LONGEST_S = 5.0, 60.0
# If more than this share would be ejected, the fault lies elsewhere, and all of them stay in use.
PANIC_SHARE = 0.5
# A refusal for want of places holds for this long at most: the queue of a full verifier has more work than that.
FULL_S = 0.25
# A verifier that restarts is back, or out of the registry, within this time.
UNREACHABLE_S = 5.0


@dataclass(slots=True)
class _Record:
    """Health record of a verifier.

    Attributes:
        lost_s: When the first call was lost since something was heard; None: none was.
        score: Score of its failures.
        num_ejections: Since the score was 0.
        ejected_until_s: End of the last ejection.
        refusal: Refusal of a session that would have waited too long for a place.
        max_wait_s: Time for which that session could wait.
        full_until_s: End of the refusal.
    """

    lost_s: float | None = None
    score: int = 0
    num_ejections: int = 0
    ejected_until_s: float = 0.0
    refusal: OverloadedError | None = None
    max_wait_s: float = 0.0
    full_until_s: float = 0.0


class VerifierHealth:
    """Health records by verifier; none means that the verifier is healthy.

    Args:
        clock: Monotonic seconds.
        on_ejected: Called with the replica id when a verifier is ejected.
    """

    def __init__(self, clock: Callable[[], float], on_ejected: Callable[[str], None] = lambda _: None) -> None:
        self._clock = clock
        self._on_ejected = on_ejected
        self._records: dict[str, _Record] = {}

    def lost(self, replica_id: str) -> None:
        """A call to a verifier was lost: it could not be reached, broke off, or fell silent."""
        record = self._record(replica_id)
        record.lost_s = self._clock() if record.lost_s is None else record.lost_s

    def heard(self, replica_id: str) -> None:
        """A verifier has answered, maybe with an error."""
        if replica_id in self._records:
            self._records[replica_id].lost_s = None

    def served(self, replica_id: str) -> None:
        """A verifier brought a session to its end, or to its next token."""
        record = self._records.get(replica_id)
        if record is not None:
            record.score = max(0, record.score - 1)
            record.num_ejections = record.num_ejections if record.score else 0

    def failed(self, replica_id: str) -> None:
        """A verifier failed a session, and the session was not to blame."""
        now_s, record = self._clock(), self._record(replica_id)
        record.score = min(EJECTED, record.score + FAILURE)
        if record.score == EJECTED and now_s >= record.ejected_until_s:
            record.num_ejections += 1
            record.ejected_until_s = now_s + min(LONGEST_S, EJECTION_S * record.num_ejections)
            record.score = EJECTED - FAILURE
            self._on_ejected(replica_id)

    def refused(self, replica_id: str, error: OverloadedError, max_wait_s: float) -> None:
        """A verifier has refused a session that could wait `max_wait_s` seconds for a place.

        It is not asked again at once: a refusal costs the verifier and the gateway milliseconds that running sessions
        need, and under overload there are more refusals than sessions.
        """
        record = self._record(replica_id)
        record.refusal, record.max_wait_s = error, max_wait_s
        record.full_until_s = self._clock() + min(FULL_S, error.retry_after_s)

    def check_room(self, replica_ids: Iterable[str], max_wait_s: float) -> None:
        """Refuses a session that all these verifiers would refuse.

        Raises:
            OverloadedError: The error of one of them.
        """
        now_s, refusal = self._clock(), None
        for replica_id in replica_ids:
            record = self._records.get(replica_id)
            if record is None or now_s >= record.full_until_s or max_wait_s > record.max_wait_s:
                return
            refusal = record.refusal
        if refusal is not None:
            raise refusal

    def without_ejected(self, able: Sequence[Replica]) -> list[Replica]:
        """Returns the verifiers that are not ejected; all of them where too many are."""
        now_s = self._clock()
        ejected = {name for name, record in self._records.items() if now_s < record.ejected_until_s}
        left = [each for each in able if each.replica_id not in ejected]
        return left if len(able) - len(left) <= PANIC_SHARE * len(able) else list(able)

    def suspects(self, replicas: Iterable[Replica]) -> list[Replica]:
        """Returns the verifiers whose calls were lost, and which nothing was heard of since."""
        return [each for each in replicas if self._lost_s(each) is not None]

    def any_reachable(self, replicas: Iterable[Replica]) -> bool:
        """Whether one of these may be reached: it has answered within the last `UNREACHABLE_S`, or was not needed."""
        since_s = self._clock() - UNREACHABLE_S
        return any(lost_s is None or lost_s > since_s for lost_s in map(self._lost_s, replicas))

    def keep_only(self, replicas: Iterable[Replica]) -> None:
        """Forgets verifiers that have left."""
        present = {each.replica_id for each in replicas}
        self._records = {name: record for name, record in self._records.items() if name in present}

    def _record(self, replica_id: str) -> _Record:
        return self._records.setdefault(replica_id, _Record())

    def _lost_s(self, replica: Replica) -> float | None:
        record = self._records.get(replica.replica_id)
        return None if record is None else record.lost_s
