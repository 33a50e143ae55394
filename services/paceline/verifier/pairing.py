"""Which drafter a session is drafted by, as drafters come and go.

The gateway names the first; from then on the verifier sees to it that each session has one that is there, since only
the verifier knows which streams are up. Pure: replicas and streams in, one address out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.messages import ModelIdentity
from paceline.store.base import Replica

# A stream that is down for so long has lost its sessions to others; dialling takes a few milliseconds.
DOWN_S = 0.2
# Pause between two looks at all sessions.
INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """The streams of a verifier.

    Attributes:
        down_s: Seconds for which each dialled drafter's stream has been down, 0 if it is up, by address.
        num_sessions: Sessions of this verifier by their drafter's address.
    """

    down_s: Mapping[str, float]
    num_sessions: Mapping[str, int]


def able_drafters(replicas: Sequence[Replica], target: ModelIdentity) -> dict[str, Replica]:
    """Returns the drafters for a target that take sessions, by address."""
    return {
        replica.address: replica
        for replica in replicas
        if not replica.draining and replica.identity is not None and replica.identity.drafts_for(target)
    }


def of_methods(able: Mapping[str, Replica], methods: Collection[str]) -> dict[str, Replica]:
    """Returns those of `able_drafters` that serve one of the methods, by address."""
    return {
        address: replica
        for address, replica in able.items()
        if replica.identity is not None and replica.identity.draft_method in methods
    }


def next_drafter(current: str, able: Mapping[str, Replica], streams: Streams) -> str:
    """Returns the address that a session should be drafted at; that of now if nothing is better.

    A session leaves a drafter that drains, has left the registry, or whose stream is down for `DOWN_S`; it goes to the
    able one with the least sessions, its own included, as far as its stream is not known to be down.

    Args:
        current: Address of its drafter; empty: none.
        able: From `able_drafters`.
        streams: As they are now.
    """
    if current in able and streams.down_s.get(current, 0.0) < DOWN_S:
        return current
    reachable = [each for each in able.values() if streams.down_s.get(each.address, 0.0) < DOWN_S]
    return _least_loaded(reachable, streams) or current


def spare_drafter(able: Mapping[str, Replica], streams: Streams) -> str:
    """Returns the address of a drafter to keep a stream to although no session has it: it saves the dialling later.

    Empty where sessions have several drafters already, or there is no other.
    """
    used = {address for address, count in streams.num_sessions.items() if count and address in able}
    if len(used) > 1:
        return ""
    return _least_loaded([each for each in able.values() if each.address not in used], streams) or ""


def _least_loaded(drafters: Sequence[Replica], streams: Streams) -> str | None:
    def load(replica: Replica) -> tuple[int, str]:
        mine = streams.num_sessions.get(replica.address, 0)
        return max(mine, replica.num_sessions), replica.address

    return min(drafters, key=load).address if drafters else None
