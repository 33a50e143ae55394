"""Method `grammar`: where a session's grammar leaves one way to go on, that way is a guess.

No model and no forward pass: the scaffolding of JSON costs no steps even without a drafter. The text of such a guess is
sure, its cut into tokens is not, as a model may spell the same text with other tokens: how often it is right,
calibration learns.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from paceline.core.grammar import OutputGrammar
from paceline.core.params import GRAMMAR
from paceline.core.tree import DraftTree
from paceline.engine.source_interface import Followed, LocalSource, Turn

# Guesses of others below which it looks for more, the best ones.
MOST_LEAVES = 4


class GrammarSource(LocalSource[OutputGrammar]):
    """Guesses what a grammar leaves no choice of."""

    name = GRAMMAR

    @override
    def follow(self, session: Followed) -> OutputGrammar | None:
        return session.grammar

    @override
    def grow(self, turns: Sequence[Turn[OutputGrammar]]) -> list[list[float]]:
        return [_grow(turn) for turn in turns]


def _grow(turn: Turn[OutputGrammar]) -> list[float]:
    """Adds what is forced below the root and below the best leaves; returns the survivals of what came of itself."""
    tree, grammar = turn.tree, turn.follower
    survivals = _add_chain(tree, tree.root, grammar.forced(), turn)
    for leaf in tree.leaves(turn.limit)[:MOST_LEAVES]:
        _add_chain(tree, leaf, grammar.forced(tree.path(leaf)), turn)
    return survivals


def _add_chain(tree: DraftTree, node: int, token_ids: Sequence[int], turn: Turn[OutputGrammar]) -> list[float]:
    """Adds a chain below a node, as far as it is worth it; returns its survivals by this source alone."""
    survivals: list[float] = []
    survival = 1.0
    for token_id in token_ids[: turn.limit - len(tree.path(node))]:
        survival *= tree.probability(GRAMMAR, 1.0)
        if survival < turn.least:
            break
        node = tree.suggest(node, token_id, 1.0, GRAMMAR)
        survivals.append(survival)
    return survivals
