"""Trees of sessions: stories of merged and commits; streams of them are in tests/unit/forest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import DRAFT_MODEL, MAX_DRAFT_TOKENS, MEDUSA, NGRAM
from paceline.core.tree import MOST_ASKED, DraftTree
from paceline.forest.records import SLOTS
from tests.support.guesses import NodeGuess
from tests.support.trees import advance, merge_into, new_tree, nodes_of, seen, show


def guess(node_id: int, parent_id: int, token_id: int, confidence: float = 0.5) -> NodeGuess:
    return NodeGuess(node_id=node_id, parent_id=parent_id, token_id=token_id, confidence=confidence)


def grown() -> DraftTree:
    """Root at length 3; 10 -> (11 -> 12, 13), 20."""
    tree = new_tree(3)
    guesses = [
        guess(1, 0, 10, 0.8),
        guess(2, 1, 11, 0.5),
        guess(3, 2, 12),
        guess(4, 1, 13, 0.25),
        guess(5, 0, 20, 0.1),
    ]
    assert merge_into(tree, guesses, 3) == [5, 0, 0]
    return tree


def tokens(tree: DraftTree) -> list[int]:
    return sorted(node.token_id for node in nodes_of(tree))


def test_survival_is_the_product_of_confidences():
    survivals = {node.token_id: node.survival for node in nodes_of(grown())}
    assert survivals == pytest.approx({10: 0.8, 20: 0.1, 11: 0.4, 13: 0.2, 12: 0.2})


def test_a_hit_keeps_the_subtree_and_its_survival_starts_anew():
    tree = grown()
    assert advance(tree, 10)
    assert tokens(tree) == [11, 12, 13]
    assert seen(tree).children[11].survival == pytest.approx(0.5)


def test_a_miss_empties_the_tree():
    tree = grown()
    assert not advance(tree, 10, 99)
    assert tokens(tree) == []
    assert seen(tree).position == 4


def test_nodes_for_an_older_base_are_walked_down_what_was_committed_since():
    tree = new_tree(3)
    advance(tree, 10, 11)
    assert merge_into(tree, [guess(1, 0, 10), guess(2, 1, 11), guess(3, 2, 12)], 3)[0] == 1
    assert tokens(tree) == [12]
    assert merge_into(tree, [guess(4, 0, 20), guess(5, 4, 21)], 3) == [0, 1, 1]


def test_children_of_a_committed_node_hang_below_the_root():
    tree = grown()
    advance(tree, 10)
    assert merge_into(tree, [guess(6, 1, 77)], 3)[0] == 1
    assert 77 in seen(tree).children


def test_a_guess_that_is_there_adds_nothing_and_its_other_name_is_known():
    tree = grown()
    before = tokens(tree)
    assert merge_into(tree, [guess(1, 0, 10), guess(2, 1, 11)], 3) == [0, 0, 0]
    assert tokens(tree) == before
    assert merge_into(tree, [guess(9, 0, 10)], 3)[0] == 0
    assert merge_into(tree, [guess(10, 9, 55)], 3)[0] == 1
    assert 55 in seen(tree).children[10].children


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


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.floats(0, 1)), max_size=30))
def test_survival_never_rises_on_the_way_down(rows):
    tree = new_tree(1)
    for node_id, (parent_id, token_id, confidence) in enumerate(rows, start=1):
        merge_into(tree, [guess(node_id, parent_id, token_id, confidence)], 1)
    for node in nodes_of(tree):
        assert node.parent is not None
        assert 0 < node.survival <= node.parent.survival <= 1.0 + 1e-12


def test_survival_does_not_underflow_in_a_long_text_of_guesses_that_nobody_believed_in():
    tree = new_tree(1)
    for node_id in range(1, 1001):
        merge_into(tree, [guess(node_id, 0, 7, 0.001)], node_id)
        assert advance(tree, 7)
    merge_into(tree, [guess(1001, 0, 8, 0.5)], 1001)
    assert seen(tree).children[8].survival == pytest.approx(0.5)


def test_where_two_sources_guess_the_same_the_surer_one_counts():
    tree = new_tree(1)
    merge_into(tree, [guess(1, 0, 10, 0.5), guess(2, 1, 11, 0.5)], 1)
    node = tree.suggest(tree.root, 10, 0.8, NGRAM)
    assert seen(tree).children[10].survival == pytest.approx(0.8)
    assert seen(tree).children[10].children[11].survival == pytest.approx(0.4)
    assert tree.suggest(tree.root, 10, 0.1, MEDUSA) == node
    assert seen(tree).children[10].survival == pytest.approx(0.8)
    assert seen(tree).children[10].guesses == {DRAFT_MODEL: 0.5, NGRAM: 0.8, MEDUSA: 0.1}
    assert tree.forest.gone(tree.row) == [DRAFT_MODEL, DRAFT_MODEL]


def test_a_drafter_finds_a_guess_that_another_source_has_added_already():
    tree = new_tree(1)
    tree.suggest(tree.root, 10, 0.4, NGRAM)
    assert merge_into(tree, [guess(7, 0, 10, 0.9), guess(8, 7, 11, 0.5)], 1)[0] == 1
    assert nodes_of(tree)[1].path() == [10, 11]
    assert seen(tree).children[10].survival == pytest.approx(0.9)


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


def test_a_tree_prints_itself():
    text = show(grown().forest, grown().row)
    assert "10: 0.800 #1 @0 (draft_model 0.800)" in text
    assert "      12: 0.200 #3 @2" in text
