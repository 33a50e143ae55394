"""Best-first growth: of all guesses that could come next, the likeliest finds its place in the tree first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.core.tree import DraftTree, Node

# What a source needs to know of a node to guess its children.
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class _Candidate(Generic[State]):
    survival: float
    parent: Node
    token_id: int
    confidence: float
    state: State

    def __lt__(self, other: _Candidate[State]) -> bool:
        return self.survival > other.survival


def grow_best_first(
    tree: DraftTree,
    source: str,
    state: State,
    guesses: Callable[[State], Iterable[tuple[int, float, State]]],
    *,
    limit: int,
    least: float,
) -> list[float]:
    """Grows a tree from its root by one source.

    Args:
        tree: The tree.
        source: Name of the source.
        state: Of the root.
        guesses: From a node's state to its children: `(token_id, confidence, state)`, in any order.
        limit: Most guesses; what it cuts off is worth least.
        least: Survival below which no guess is worth a place.

    Returns:
        Survival of each guess by this source alone, best first.
    """
    survivals: list[float] = []
    heap: list[_Candidate[State]] = []

    def nominate(above: float, parent: Node, of: State) -> None:
        for token_id, confidence, below in guesses(of):
            survival = above * tree.probability(source, confidence)
            if survival >= least:
                heapq.heappush(heap, _Candidate(survival, parent, token_id, confidence, below))

    nominate(1.0, tree.root, state)
    while heap and len(survivals) < limit:
        best = heapq.heappop(heap)
        survivals.append(best.survival)
        nominate(best.survival, tree.suggest(best.parent, best.token_id, best.confidence, source), best.state)
    return survivals
