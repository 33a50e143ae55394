"""Chooses a session's drafter: one rule, for sessions that begin and for those whose drafter is gone.

Only verifiers pair, since only they know which streams are up; the planner uses the same object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from paceline.core.params import DRAFT_MODEL

# A stream that is down for this time loses its sessions to others; dialling takes a few milliseconds.
DOWN_S = 0.2
# Assumed round trip before a measurement: within a zone, and to another or an unknown one.
NEAR_S, FAR_S = 0.0005, 0.002
# A drafter that is full answers later than an idle one by this time.
FULL_S = 0.02


def expected_round_trip_s(zone: str, other: str) -> float:
    """The assumed round trip between two zones before it is measured; an empty name is an unknown zone."""
    return NEAR_S if zone and zone == other else FAR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterCandidate:
    """A drafter that takes sessions.

    Attributes:
        method: The drafting method it serves.
        num_sessions: Sessions of all verifiers that it drafts for, as it last reported.
        max_sessions: Sessions it has room for.
        down_s: Seconds for which the stream to it has been down; 0: it is up, or it has not been dialled yet.
        round_trip_s: Seconds to it and back, without its work: measured, or as expected.
    """

    address: str
    method: str = DRAFT_MODEL
    num_sessions: int = 0
    max_sessions: int = 0
    down_s: float = 0.0
    round_trip_s: float = FAR_S

    @property
    def reachable(self) -> bool:
        """Whether its stream is up, or may soon be."""
        return self.down_s < DOWN_S


class Pairing:
    """The drafters that a verifier knows, and how many of its sessions each has.

    A session stays with its drafter unless that one drains, has left the registry, or its stream is down for `DOWN_S`.
    It goes to the reachable one of its methods that is expected to answer first: the round trip to it, and what its
    sessions take, by their share of its size, own ones counted as they are.

    Attributes:
        num_own: Sessions of this verifier by their drafter's address.
    """

    def __init__(self) -> None:
        self.num_own: Counter[str] = Counter()
        self._drafters: Mapping[str, DrafterCandidate] = {}

    def know(self, drafters: Iterable[DrafterCandidate]) -> None:
        """Updates the drafters that are there."""
        self._drafters = {each.address: each for each in drafters}
        self.num_own = +self.num_own

    def count(self, address: str, change: int) -> None:
        """Adds to the sessions that have this drafter; an empty address is none."""
        if address:
            self.num_own[address] += change

    def choose(self, methods: Collection[str], current: str = "") -> str:
        """Returns the address of the drafter that a session should have; the present one if none is better.

        Args:
            methods: Methods the session may be drafted by; none: it gets no drafter.
            current: Address of its drafter; empty: it has none.
        """
        own = self._drafters.get(current)
        if own is not None and own.reachable and own.method in methods:
            return current
        able = [each for each in self._drafters.values() if each.reachable and each.method in methods]
        return self._soonest(able) or current

    def spare(self) -> str:
        """Returns the address of a drafter to keep a stream to although no session has it: it saves the dialling later.

        Empty where sessions have several drafters already, or there is no other.
        """
        used = {address for address in self._drafters if self.num_own[address]}
        if len(used) > 1:
            return ""
        return self._soonest(each for each in self._drafters.values() if each.address not in used)

    def _soonest(self, drafters: Iterable[DrafterCandidate]) -> str:
        return min(((*self._wait(each), each.address) for each in drafters), default=(0.0, 0, ""))[-1]

    def _wait(self, drafter: DrafterCandidate) -> tuple[float, int]:
        """Seconds until its answer, and own sessions to break ties: reports of drafters are a heartbeat old."""
        own = self.num_own[drafter.address]
        load = max(own, drafter.num_sessions) / max(1, drafter.max_sessions)
        return drafter.round_trip_s + load * FULL_S, own
