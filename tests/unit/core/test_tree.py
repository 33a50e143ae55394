"""Trees of sessions: stories of merged and commits; streams of them are in tests/unit/forest."""

from __future__ import annotations

import pytest

from paceline.core.params import MAX_DRAFT_TOKENS, NGRAM
from paceline.core.tree import MOST_ASKED, DraftTree
from paceline.forest.records import SLOTS
from tests.support.guesses import NodeGuess
from tests.support.trees import advance, merge_into, new_tree, nodes_of, seen, show


def guess(node_id: int, parent_id: int, token_id: int, confidence: float = 0.5) -> NodeGuess:
    return NodeGuess(node_id=node_id, parent_id=parent_id, token_id=token_id, confidence=confidence)


def tokens(tree: DraftTree) -> list[int]:
    return sorted(node.token_id for node in nodes_of(tree))


@pytest.mark.parametrize("node_id", [2**30, 2**31 - 1])
def test_ids_may_be_as_large_as_a_column_holds(node_id):
    tree = new_tree(3)
    assert merge_into(tree, [guess(node_id, 0, 10), guess(7, node_id, 11)], 3) == [2, 0, 0]
    assert nodes_of(tree)[1].path() == [10, 11]


def test_a_drafter_that_never_ends_fills_a_tree_and_no_more():
    tree = new_tree(3)
    counts = merge_into(tree, [guess(number, 0, number) for number in range(1, 2000)], 3)
    assert counts == [1024, 0, 1999 - 1024]
    full = tree.suggest(tree.root, 5000, 0.5, NGRAM)
    assert tree.suggest(full, 5001, 0.5, NGRAM) == full < 0
    assert tree.num_nodes == 1024


def test_survival_does_not_underflow_in_a_long_text_of_guesses_that_nobody_believed_in():
    tree = new_tree(1)
    for node_id in range(1, 1001):
        merge_into(tree, [guess(node_id, 0, 7, 0.001)], node_id)
        assert advance(tree, 7)
    merge_into(tree, [guess(1001, 0, 8, 0.5)], 1001)
    assert seen(tree).children[8].survival == pytest.approx(0.5)


def test_what_may_not_follow_is_barred_with_all_that_hangs_below_it():
    tree = new_tree(1, can_follow=lambda tokens: 13 not in tokens)
    counts = merge_into(tree, [guess(1, 0, 13, 0.9), guess(2, 1, 14, 0.9), guess(3, 0, 12, 0.2)], 1)
    assert counts == [1, 0, 2]
    assert [slot for slot in tree.best(8).slots[0].tolist() if slot >= 0] == [2], show(tree.forest, tree.row)
    assert tree.suggest(tree.root, 13, 1.0, NGRAM) == 0
    assert tree.best(8).slots[0, 0] == 2


def chain(length: int, first_id: int = 1) -> list[NodeGuess]:
    return [guess(first_id + at, first_id + at - 1 if at else 0, 10, 0.99) for at in range(length)]


def test_a_step_asks_a_grammar_about_a_bounded_number_of_tokens_however_deep_a_drafter_guesses():
    asked: list[int] = []
    tree = new_tree(1, can_follow=lambda tokens: asked.append(len(tokens)) is None)
    added, _, masked = merge_into(tree, chain(1000), 1)
    assert sum(asked) == MOST_ASKED
    assert (added, masked) == (MAX_DRAFT_TOKENS, 1000 - MAX_DRAFT_TOKENS), "as deep as a step can verify"
    merge_into(tree, chain(1, first_id=1001), 1)
    assert len(asked) == MAX_DRAFT_TOKENS
    assert not advance(tree, 11)
    tree.follow_commit(2)
    assert merge_into(tree, chain(3, first_id=2001), 2) == [3, 0, 0], "the next step asks again"


def test_what_a_drafter_offers_beyond_what_a_tree_can_hold_is_not_looked_at_until_the_next_commit():
    tree = new_tree(1)
    again = [guess(1, 0, 10, 0.1), *(guess(node_id, 0, 10, 0.5) for node_id in range(2, SLOTS + 8))]
    assert merge_into(tree, again, 1) == [1, 0, 7]
    assert merge_into(tree, [guess(5000, 0, 11, 0.9)], 1) == [0, 0, 1]
    assert advance(tree, 10)
    assert merge_into(tree, [guess(5001, 0, 11, 0.9)], 2) == [1, 0, 0]
