"""The draft tree: grafting, pruning, survival and the walk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.messages import NodeGuess
from paceline.core.params import DRAFT_MODEL
from paceline.core.tree import DraftTree, NodeState, best_first, walk


def guess(node_id: int, parent_id: int, token_id: int, confidence: float = 0.5) -> NodeGuess:
    return NodeGuess(node_id=node_id, parent_id=parent_id, token_id=token_id, confidence=confidence)


def grown() -> DraftTree:
    """Root at length 3; 10 -> (11 -> 12, 13), 20."""
    tree = DraftTree(3)
    guesses = [
        guess(1, 0, 10, 0.8),
        guess(2, 1, 11, 0.5),
        guess(3, 2, 12),
        guess(4, 1, 13, 0.25),
        guess(5, 0, 20, 0.1),
    ]
    outcome = tree.graft(guesses, 3, [0, 1, 2])
    assert outcome.num_added == 5
    return tree


def tokens(tree: DraftTree) -> list[int]:
    return [node.token_id for node in tree.nodes()]


def test_survival_is_the_product_of_confidences():
    survivals = {node.token_id: grown().survival(node) for node in grown().nodes()}
    assert survivals == pytest.approx({10: 0.8, 20: 0.1, 11: 0.4, 13: 0.2, 12: 0.2})


def test_a_hit_keeps_the_subtree_and_its_survival_starts_anew():
    tree = grown()
    pruning = tree.advance([10])
    assert pruning.hit
    assert [node.token_id for node in pruning.matched] == [10]
    assert [node.token_id for node in pruning.dead] == [20]
    assert tree.committed_len == 4
    assert tokens(tree) == [11, 13, 12]
    assert tree.survival(tree.root.children[11]) == pytest.approx(0.5)


def test_a_miss_empties_the_tree_but_tells_what_matched():
    tree = grown()
    node = tree.root.children[20]
    pruning = tree.advance([10, 99])
    assert not pruning.hit
    assert [each.token_id for each in pruning.matched] == [10]
    assert sorted(each.token_id for each in pruning.dead) == [11, 12, 13, 20]
    assert tokens(tree) == []
    assert tree.committed_len == 5
    assert node.state is NodeState.DEAD


def test_nodes_for_an_older_base_are_walked_down_what_was_committed_since():
    tree = DraftTree(3)
    tree.advance([10, 11])
    committed = [0, 1, 2, 10, 11]
    right = [guess(1, 0, 10), guess(2, 1, 11), guess(3, 2, 12)]
    assert tree.graft(right, 3, committed).num_added == 1
    assert tokens(tree) == [12]
    wrong = [guess(4, 0, 20), guess(5, 4, 21)]
    outcome = tree.graft(wrong, 3, committed)
    assert (outcome.num_added, outcome.num_late, outcome.num_stale) == (0, 1, 1)


def test_children_of_a_committed_node_hang_below_the_root():
    tree = grown()
    tree.advance([10])
    assert tree.graft([guess(6, 1, 77)], 3, [0, 1, 2, 10]).num_added == 1
    assert 77 in tree.root.children


def test_a_guess_that_is_there_adds_nothing_and_its_other_name_is_known():
    tree = grown()
    before = tokens(tree)
    assert tree.graft([guess(1, 0, 10), guess(2, 1, 11)], 3, [0, 1, 2]).num_added == 0
    assert tokens(tree) == before
    assert tree.graft([guess(9, 0, 10)], 3, [0, 1, 2]).num_added == 0
    assert tree.graft([guess(10, 9, 55)], 3, [0, 1, 2]).num_added == 1
    assert 55 in tree.root.children[10].children


def test_the_best_nodes_come_parents_first():
    ranked = best_first(grown(), 4)
    assert [node.token_id for node in ranked] == [10, 11, 13, 12]
    for node in ranked:
        assert node.parent is grown().root or node.parent.state is not NodeState.DEAD


def test_the_walk_commits_verified_tokens_and_one_more():
    tree = grown()
    script = iter([10, 11, 42])
    assert walk(tree.root, list(tree.nodes()), lambda _: next(script)) == (10, 11, 42)
    script = iter([10, 11])
    assert walk(tree.root, [tree.root.children[10]], lambda _: next(script)) == (10, 11), "11 was not verified"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3), st.floats(0, 1)), max_size=30))
def test_survival_never_rises_on_the_way_down(rows):
    tree = DraftTree(1)
    for node_id, (parent_id, token_id, confidence) in enumerate(rows, start=1):
        tree.graft([guess(node_id, parent_id, token_id, confidence)], 1, [0])
    for node in tree.nodes():
        assert 0 < tree.survival(node) <= tree.survival(node.parent) <= 1.0 + 1e-12


def test_survival_does_not_underflow_in_a_long_text_of_guesses_that_nobody_believed_in():
    tree, committed = DraftTree(1), [0]
    for node_id in range(1, 1001):
        tree.graft([guess(node_id, 0, 7, 0.001)], len(committed), committed)
        assert tree.advance([7]).hit
        committed.append(7)
    tree.graft([guess(1001, 0, 8, 0.5)], len(committed), committed)
    assert tree.survival(tree.root.children[8]) == pytest.approx(0.5)


def test_where_two_sources_guess_the_same_the_surer_one_counts_and_both_learn():
    tree = DraftTree(1)
    tree.graft([guess(1, 0, 10, 0.5), guess(2, 1, 11, 0.5)], 1, [0])
    node = tree.suggest(tree.root, 10, 0.8, "ngram")
    below = node.children[11]
    assert tree.survival(node) == pytest.approx(0.8)
    assert tree.survival(below) == pytest.approx(0.4)
    assert tree.suggest(tree.root, 10, 0.1, "suffix") is node
    assert tree.survival(node) == pytest.approx(0.8)
    assert set(tree.outcomes([10])) == {(DRAFT_MODEL, 0.5, True), ("ngram", 0.8, True), ("suffix", 0.1, True)}
    assert (node.first_source, tree.num_nodes) == (DRAFT_MODEL, 2)


def test_a_drafter_finds_a_guess_that_another_source_has_hung_already():
    tree = DraftTree(1)
    node = tree.suggest(tree.root, 10, 0.4, "ngram")
    assert tree.graft([guess(7, 0, 10, 0.9), guess(8, 7, 11, 0.5)], 1, [0]).num_added == 1
    assert node.children[11].node_id == 8
    assert tree.survival(node) == pytest.approx(0.9)
