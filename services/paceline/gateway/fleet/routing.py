"""Chooses the verifier of a session: prefix affinity within a bound on the load. Pure: no clock, no I/O, no store.

A verifier that holds the beginning of a prompt need not compute it again, so a session goes where most of its prompt is
known, unless that verifier has more than its share of the sessions. The gateway does not know what verifiers really
hold: it remembers what it sent where, and assumes that they forget in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from paceline.core.messages import GATEWAY, VERIFIER
from paceline.core.pairing import expected_round_trip_s
from paceline.gateway.fleet.prefixes import HASH_BYTES, PrefixIndex, covered_tokens, prefix_blocks
from paceline.store.base import Replica

# A verifier that holds a whole prompt may have this multiple of its fair share beyond what one that holds nothing may
# have. A hit saves at most the whole prompt, so it may cost at most one more wait of the fair length.
AFFINITY = 1.0


class Router:
    """Chooses verifiers for sessions by what this gateway sent them before.

    Args:
        zone: Where this gateway runs; among verifiers that hold equally much, it prefers those of its zone. Empty:
            unknown.
    """

    def __init__(self, *, zone: str = "") -> None:
        self._zone = zone
        self._index = PrefixIndex()
        self._replicas: Sequence[Replica] = ()
        self._elsewhere: dict[str, int] = {}

    def place(
        self,
        replicas: Sequence[Replica],
        able: Sequence[Replica],
        token_ids: Sequence[int],
        in_flight: Mapping[str, int],
        salt: str = "",
    ) -> Replica:
        """Returns the verifier for a session and remembers that it gets the prompt.

        Args:
            replicas: The fleet; the same object until it is read again.
            able: Verifiers to choose from, at least one; all of one model.
            token_ids: The prompt, and the tokens generated so far when a session moves.
            in_flight: Sessions of this gateway by replica id; the registry lags behind by a heartbeat.
            salt: Cached prefixes are shared only among sessions with the same one.
        """
        if replicas is not self._replicas:
            self._read(replicas, in_flight)
        blocks = prefix_blocks(_model(able[0]) + salt, token_ids)
        sessions = {
            replica.replica_id: self._elsewhere[replica.replica_id] + in_flight.get(replica.replica_id, 0)
            for replica in able
        }
        chosen = self._choose(able, blocks, len(token_ids), sessions)
        self._index.add(chosen.replica_id, blocks)
        return chosen

    def follow(self, verifier: Replica, token_ids: Sequence[int], salt: str = "") -> None:
        """Remembers that a verifier has all committed tokens of a session: the next turn's prompt begins with them."""
        self._index.add(verifier.replica_id, prefix_blocks(_model(verifier) + salt, token_ids))

    def forget(self, replica_id: str) -> None:
        """Forgets what a verifier was sent: it failed, and if it comes back, it comes back empty."""
        self._index.forget(replica_id)

    def _read(self, replicas: Sequence[Replica], in_flight: Mapping[str, int]) -> None:
        """Takes a new view of the fleet: forgets verifiers that left, and counts the sessions of other gateways.

        The count stays constant until the next view, while this gateway's own count is always exact. Otherwise
        all sessions between two views would go to the same verifier.
        """
        self._replicas = replicas
        self._elsewhere = {
            replica.replica_id: max(0, replica.num_sessions - in_flight.get(replica.replica_id, 0))
            for replica in replicas
        }
        for replica_id in self._index.replica_ids:
            if replica_id not in self._elsewhere:
                self._index.forget(replica_id)

    def _choose(
        self, able: Sequence[Replica], blocks: Sequence[int], num_tokens: int, sessions: Mapping[str, int]
    ) -> Replica:
        known = self._index.longest(blocks)
        held = {replica_id: covered_tokens(length) / num_tokens for replica_id, length in known.items()}
        eligible = within_bound(able, sessions, held)
        ranks = [(held.get(each.replica_id, 0.0), -expected_round_trip_s(self._zone, each.zone)) for each in eligible]
        best = [each for each, rank in zip(eligible, ranks, strict=True) if rank == max(ranks)]
        num_known = max(known.values(), default=0)
        if num_known < len(blocks) and _is_one_of_several(self._replicas):
            return max(best, key=lambda replica: _rendezvous(blocks[num_known], replica.replica_id))
        return least_loaded(best, sessions)


def _is_one_of_several(replicas: Sequence[Replica]) -> bool:
    return sum(replica.role == GATEWAY for replica in replicas) > 1


def _rendezvous(block: int, replica_id: str) -> bytes:
    """Returns the weight of a replica for a block (highest random weight): all gateways rank replicas alike.

    The block is the first one that is new to a gateway: what comes before it is shared, such as a system prompt, and
    would send all conversations to the same verifier.
    """
    return blake2b(replica_id.encode(), key=block.to_bytes(HASH_BYTES, "little"), digest_size=HASH_BYTES).digest()


def able_verifiers(replicas: Sequence[Replica], model: str) -> list[Replica]:
    """Returns the verifiers of a model that take sessions."""
    return [
        replica
        for replica in replicas
        if replica.role == VERIFIER
        and not replica.draining
        and replica.identity is not None
        and replica.identity.name == model
    ]


def within_bound(able: Sequence[Replica], sessions: Mapping[str, int], held: Mapping[str, float]) -> list[Replica]:
    """Returns the verifiers that may have one session more: those with `sessions < (1 + AFFINITY * held) * fair share`.

    The fair share is that of all sessions, the new one included, by the verifiers' sizes. They cannot all have their
    share before the new one is placed, so the least loaded is always returned.

    Args:
        able: The verifiers to choose from.
        sessions: The number of each, by replica id.
        held: Share of the prompt that each is known to hold, 0 to 1, by replica id.
    """
    total = 1 + sum(sessions[replica.replica_id] for replica in able)
    size = sum(_size(replica) for replica in able)
    return [
        replica
        for replica in able
        if sessions[replica.replica_id] * size
        < (1 + AFFINITY * held.get(replica.replica_id, 0.0)) * total * _size(replica)
    ]


def least_loaded(able: Sequence[Replica], sessions: Mapping[str, int]) -> Replica:
    """Returns the replica with the fewest sessions for its size; of equals the first by id."""
    return min(able, key=lambda replica: (sessions[replica.replica_id] / _size(replica), replica.replica_id))


def _model(verifier: Replica) -> str:
    assert verifier.identity is not None, "a verifier without identity is never able"
    return verifier.identity.name


def _size(replica: Replica) -> int:
    return max(1, replica.max_sessions)
