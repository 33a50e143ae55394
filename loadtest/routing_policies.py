"""What the routing bench compares: the gateway's own router, and three simpler ways to choose a verifier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from loadtest.conversations import Request, tokens_of
from paceline.gateway.prefixes import PrefixIndex, prefix_blocks
from paceline.gateway.routing import Router, able_verifiers, least_loaded
from paceline.store.base import Replica

MODEL = "model"


class Policy(Protocol):
    """What chooses verifiers in every gateway."""

    def place(self, gateway: int, request: Request, replicas: Sequence[Replica], in_flight: Mapping[str, int]) -> str:
        """Returns the id of the chosen replica; `in_flight` are the gateway's own sessions."""

    def ended(self, gateway: int, request: Request, replica_id: str) -> None:
        """Is told of every session's end."""


class RoundRobin:
    """One after the other, in each gateway."""

    def __init__(self) -> None:
        self._turns: Counter[int] = Counter()

    def place(self, gateway: int, request: Request, replicas: Sequence[Replica], in_flight: Mapping[str, int]) -> str:
        """Returns the next one."""
        self._turns[gateway] += 1
        able = able_verifiers(replicas, MODEL)
        return able[(gateway + self._turns[gateway]) % len(able)].replica_id

    def ended(self, gateway: int, request: Request, replica_id: str) -> None:
        """Nothing to learn."""


class LeastLoaded:
    """The fewest sessions, as the registry shows them or as the gateway itself counts, whichever is more."""

    def place(self, gateway: int, request: Request, replicas: Sequence[Replica], in_flight: Mapping[str, int]) -> str:
        """Returns the least loaded one."""
        able = able_verifiers(replicas, MODEL)
        return least_loaded(able, _seen_sessions(able, in_flight)).replica_id

    def ended(self, gateway: int, request: Request, replica_id: str) -> None:
        """Nothing to learn."""


class PrefixOnly:
    """The longest known prefix, whatever the load; the load among equals only.

    Args:
        num_gateways: How many there are, each with an index of its own.
    """

    def __init__(self, num_gateways: int) -> None:
        self._indexes = [PrefixIndex() for _ in range(num_gateways)]

    def place(self, gateway: int, request: Request, replicas: Sequence[Replica], in_flight: Mapping[str, int]) -> str:
        """Returns the one that was sent most of the prompt."""
        blocks = prefix_blocks(MODEL, tokens_of(request.block_ids, request.num_input_tokens))
        known = self._indexes[gateway].longest(blocks)
        able = able_verifiers(replicas, MODEL)
        most = max(known.values(), default=0)
        best = [replica for replica in able if known.get(replica.replica_id, 0) == most]
        chosen = least_loaded(best, _seen_sessions(able, in_flight)).replica_id
        self._indexes[gateway].add(chosen, blocks)
        return chosen

    def ended(self, gateway: int, request: Request, replica_id: str) -> None:
        """Remembers what the session generated, if the trace knows."""
        if request.final_block_ids is not None:
            token_ids = tokens_of(request.final_block_ids, request.num_final_tokens)
            self._indexes[gateway].add(replica_id, prefix_blocks(MODEL, token_ids))


class Routed:
    """The gateway's own `Router`, one in each gateway, fed with token ids.

    Args:
        num_gateways: How many there are.
    """

    def __init__(self, num_gateways: int) -> None:
        self._routers = [Router() for _ in range(num_gateways)]
        self._verifiers: dict[str, Replica] = {}

    def place(self, gateway: int, request: Request, replicas: Sequence[Replica], in_flight: Mapping[str, int]) -> str:
        """Returns the router's choice."""
        token_ids = tokens_of(request.block_ids, request.num_input_tokens)
        self._verifiers = {replica.replica_id: replica for replica in able_verifiers(replicas, MODEL)}
        able = list(self._verifiers.values())
        return self._routers[gateway].place(replicas, able, token_ids, in_flight).replica_id

    def ended(self, gateway: int, request: Request, replica_id: str) -> None:
        """Tells the router what the session generated, if the trace knows."""
        if request.final_block_ids is not None:
            token_ids = tokens_of(request.final_block_ids, request.num_final_tokens)
            self._routers[gateway].follow(self._verifiers[replica_id], token_ids)


def _seen_sessions(able: Sequence[Replica], in_flight: Mapping[str, int]) -> dict[str, int]:
    return {r.replica_id: max(r.num_sessions, in_flight.get(r.replica_id, 0)) for r in able}
