"""Best-first growth: of all guesses that could come next, the likeliest finds its place in the tree first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import count
from typing import TypeVar

from paceline.core.tree import DraftTree, Node

# What a source needs to know of a node to guess its children.
State = TypeVar("State")


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
    # Negated survivals, as the least comes first; of equals the one that came first.
    heap: list[tuple[float, int, Node, int, float, State]] = []
    arrivals = count()

    def nominate(above: float, parent: Node, of: State) -> None:
        for token_id, confidence, below in guesses(of):
            survival = above * tree.probability(source, confidence)
            if survival >= least:
                heapq.heappush(heap, (-survival, next(arrivals), parent, token_id, confidence, below))

    nominate(1.0, tree.root, state)
    while heap and len(survivals) < limit:
        negated, _, parent, token_id, confidence, below = heapq.heappop(heap)
        if not tree.permits(parent, token_id):
            continue
        survivals.append(-negated)
        nominate(-negated, tree.suggest(parent, token_id, confidence, source), below)
    return survivals
