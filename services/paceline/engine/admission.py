"""Order of sessions for places, pages and prompts, and the wait of a new session; pure, time is an argument.

Tenants get equal shares, whatever they send and whatever priority they name. By Little's law (1961) a queue of `ahead`
sessions that leave at `rate` a second is `ahead / rate` seconds long. The rate is that of the last sessions that ended
while others waited: at other times it would be the rate of requests, not the rate that is possible.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from paceline.core.errors import OverloadedError
from paceline.engine.target_session import TargetSession

# Ends that the rate is taken from; with fewer than `LEAST_ENDS` there is none yet.
NUM_ENDS = 64
LEAST_ENDS = 2
LEAST_RETRY_S = 0.5
# Part of its tenant's prompt rows that the oldest session gets: short prompts of its tenant delay a long one by this
# factor at most.
OLDEST_PART = 4


def first_in_turn(waiting: Iterable[TargetSession], held: Mapping[str, int]) -> TargetSession:
    """The session that gets a place next: that of the tenant which holds fewest, then the first in order."""
    return min(waiting, key=lambda session: (held[session.tenant], session.order))


def last_in_turn(running: Iterable[TargetSession], held: Mapping[str, int]) -> TargetSession:
    """The session that loses its place first: that of the tenant which holds most, then the last in order."""
    return max(running, key=lambda session: (held[session.tenant], session.order))


def gives_way(running: Iterable[TargetSession], held: Mapping[str, int], tenant: str) -> TargetSession | None:
    """The session that gives its place to a tenant's: it has no token yet, and its tenant has more all the same."""
    readers = [each for each in running if not each.is_decoding and held[each.tenant] > held[tenant] + 1]
    return last_in_turn(readers, held) if readers else None


def prompt_rows(reading: Sequence[TargetSession], room: int) -> dict[int, int]:
    """How many prompt tokens a step reads of which session, by number.

    Each tenant gets an equal share of the room, and what others leave of theirs; see `_rows_of_tenant`.
    """
    queues: dict[str, list[TargetSession]] = {}
    for session in reading:
        queues.setdefault(session.tenant, []).append(session)
    rows: dict[int, int] = {}
    tenants = sorted(queues.values(), key=lambda queue: sum(each.pages.num_missing for each in queue))
    for place, queue in enumerate(tenants):
        theirs = _rows_of_tenant(queue, -(-room // (len(tenants) - place)))
        room -= sum(theirs.values())
        rows |= theirs
    return rows


def _rows_of_tenant(queue: Sequence[TargetSession], share: int) -> dict[int, int]:
    """The shortest prompts are read first, but part of the share is that of the oldest session."""
    oldest = min(queue, key=lambda session: session.number)
    rows = {oldest.number: min(oldest.pages.num_missing, -(-share // OLDEST_PART))}
    left = share - rows[oldest.number]
    for session in sorted(queue, key=lambda each: (each.request.priority, each.pages.num_missing, each.number)):
        more = min(left, session.pages.num_missing - rows.get(session.number, 0))
        rows[session.number] = rows.get(session.number, 0) + more
        left -= more
    return rows


class QueueClock:
    """Estimates the length of a queue in seconds, from when sessions ended."""

    def __init__(self) -> None:
        self._ends_s: deque[float] = deque(maxlen=NUM_ENDS)

    def ended(self, now_s: float, *, num_waiting: int) -> None:
        """A session ended while `num_waiting` others waited for a place."""
        if num_waiting:
            self._ends_s.append(now_s)
        else:
            self._ends_s.clear()

    def wait_s(self, now_s: float, *, ahead: int) -> float:
        """Expected seconds until `ahead` sessions have ended; 0 while nothing is known."""
        if ahead <= 0 or len(self._ends_s) < LEAST_ENDS:
            return 0.0
        # The time since the last end counts, so that a stall makes the queue longer.
        span_s = now_s - self._ends_s[0]
        return ahead * span_s / len(self._ends_s)


def num_ahead(tenant: str, priority: int, others: Sequence[tuple[str, int]], *, num_places: int) -> int:
    """Returns how many sessions must end before a new one gets a place.

    Args:
        others: Tenants and priorities of those under way; some of them have the places, whatever their priority.
        num_places: How many places there are.
    """
    if len(others) < num_places:
        return 0
    mine = sum(1 for other, theirs in others if other == tenant and theirs <= priority)
    # A tenant's next session comes before another's if that one has more.
    foreign = Counter(other for other, _ in others if other != tenant)
    before_it = mine + sum(min(count, mine + 1) for count in foreign.values())
    return max(1, before_it + 1 - num_places)


def check_wait(wait_s: float, most_s: float | None) -> None:
    """Refuses a session that would wait longer than it may.

    Args:
        most_s: Longest wait asked for; None: any.

    Raises:
        OverloadedError: It would; says when to come again.
    """
    if most_s is not None and wait_s > most_s:
        raise OverloadedError(
            f"a place would be free in about {wait_s:.1f} s, the request may wait {most_s:.1f} s",
            retry_after_s=max(LEAST_RETRY_S, wait_s - most_s),
        )
