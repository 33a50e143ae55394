"""Shared parts of sources inside the verifier: guesses from a row of logits, and growing a tree best first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from paceline.core.calibration import NUM_RANKED, confidences
from paceline.core.processors import UnusableLogitsError
from paceline.engine.source_interface import Followed, Turn

# State of a node from which a source guesses its children.
State = TypeVar("State")


def root_is_next(session: Followed) -> bool:
    """Whether KV and states of all tokens but the root are there."""
    return session.pages.num_missing == 1 and len(session.tokens) > 1


def best_guesses(
    session: Followed, logits: np.ndarray, position: int, path: Sequence[int], count: int
) -> list[tuple[int, float]]:
    """The `count` best guesses at a position, best first, each with its confidence; none from unusable logits.

    Args:
        session: Session whose noise and processors apply.
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


class Guess(NamedTuple, Generic[State]):
    """A node of the tree, or its root; the survival by this source alone; and the state to guess its children from."""

    node: int
    survival: float
    state: State


class Growth(Generic[State]):
    """A tree that one source grows: of all guesses that could come next, the likeliest is added first.

    Args:
        turn: Whose tree it is, and how much it may grow.
        source: Name of the source.

    Attributes:
        survivals: Survivals of the guesses added so far, best first.
    """

    def __init__(self, turn: Turn[Any], source: str) -> None:
        self.survivals: list[float] = []
        self._tree, self._source, self._limit, self._least = turn.tree, source, turn.limit, turn.least
        # Negated survivals, as the least comes first; of equals the one that came first.
        self._heap: list[tuple[float, int, int, int, float, State]] = []
        self._arrivals = count()

    def nominate(self, above: Guess[Any], guesses: Iterable[tuple[int, float, State]]) -> None:
        """Offers the children of a guess: `(token_id, confidence, state)`, in any order."""
        for token_id, confidence, below in guesses:
            survival = above.survival * self._tree.probability(self._source, confidence)
            if survival >= self._least:
                heapq.heappush(self._heap, (-survival, next(self._arrivals), above.node, token_id, confidence, below))

    def take(self) -> Guess[State] | None:
        """Adds the best guess to the tree; None: there is none, or no place."""
        while self._heap and len(self.survivals) < self._limit:
            negated, _, parent, token_id, confidence, state = heapq.heappop(self._heap)
            if self._tree.permits(parent, token_id):
                self.survivals.append(-negated)
                return Guess(self._tree.suggest(parent, token_id, confidence, self._source), -negated, state)
        return None

    def prospect(self, child_share: float) -> tuple[float, float]:
        """Expected tokens with all guesses at hand, and what a child of the best one would add to them.

        Args:
            child_share: Survival of a child as a share of its parent's.
        """
        rest = [-each[0] for each in heapq.nsmallest(self._limit - len(self.survivals), self._heap)]
        survivals = [*self.survivals, *rest]
        child = child_share * rest[0] if rest else 0.0
        replaced = survivals[-1] if len(survivals) >= self._limit else 0.0
        return 1.0 + sum(survivals), max(0.0, child - replaced) if child >= self._least else 0.0


def grow_best_first(
    turn: Turn[Any], source: str, state: State, guesses: Callable[[State], Iterable[tuple[int, float, State]]]
) -> None:
    """Grows a session's tree from its root by one source.

    Args:
        source: Name of the source.
        state: The root's state.
        guesses: From a node's state to its children.
    """
    growth = Growth[State](turn, source)
    best: Guess[State] | None = Guess(turn.tree.root, 1.0, state)
    while best is not None:
        growth.nominate(best, guesses(best.state))
        best = growth.take()
