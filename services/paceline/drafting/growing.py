"""What sources inside the verifier have in common: guesses from a row of logits, and growing a tree best first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

import numpy as np

from paceline.core.calibration import NUM_RANKED, confidences
from paceline.core.processors import UnusableLogitsError
from paceline.core.tree import DraftTree
from paceline.engine.source_interface import Followed

# What a source needs to know of a node to guess its children.
State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class StatelessFollower:
    """A follower without state of its own: all it needs lies in the session's tokens and pages."""

    session: Followed

    @property
    def root_is_next(self) -> bool:
        """Whether KV and states of all tokens but the root are there."""
        return self.session.pages.num_missing == 1 and len(self.session.tokens) > 1


def best_guesses(
    session: Followed, logits: np.ndarray, position: int, path: Sequence[int], count: int
) -> list[tuple[int, float]]:
    """The `count` best guesses at a position, best first, each with its confidence; none from unusable logits.

    Args:
        session: Whose noise and processors apply.
        logits: float32 [vocab].
        position: Absolute position of the token to guess.
        path: Guessed tokens between the committed ones and that position.
    """
    try:
        token_ids, weights = session.rank(logits, position, NUM_RANKED, path)
    except UnusableLogitsError:
        return []
    sure = confidences(np.array(weights), greedy=session.greedy).tolist()
    return list(zip(token_ids, sure, strict=True))[:count]


def grow_best_first(
    tree: DraftTree,
    source: str,
    state: State,
    guesses: Callable[[State], Iterable[tuple[int, float, State]]],
    *,
    limit: int,
    least: float,
) -> list[float]:
    """Grows a tree from its root by one source: of all guesses that could come next, the likeliest is added first.

    Args:
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
    heap: list[tuple[float, int, int, int, float, State]] = []
    arrivals = count()

    def nominate(above: float, parent: int, of: State) -> None:
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
