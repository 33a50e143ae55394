"""Trees in shared memory: what is read is what was written, or nothing; and its chain is the forest's own."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.params import DRAFT_MODEL
from paceline.forest import ROOT, Forest, rows_of
from paceline.vllm.board import (
    MOST_NODES,
    NUM_RECORDS,
    BoardTree,
    ReadyDrafts,
    SessionNumbers,
    SharedTrees,
    make_board,
    worth_waiting,
)

#   5 ─ 6 ─ 7        a path of high survival, with a side branch
#   └── 8 ─ 9
TREE = BoardTree(
    committed_len=20,
    least=0.2,
    price=0.2,
    child_share=0.5,
    wait_share=0.25,
    weights=[math.log(each) for each in (0.9, 0.8, 0.3, 0.7, 0.25)],
    token_ids=[5, 6, 8, 7, 9],
    parents=[ROOT, 0, 0, 1, 2],
)


@pytest.fixture
def board() -> Iterator[SharedTrees]:
    file = make_board()
    made = SharedTrees(file)
    os.close(file)
    yield made
    made.close()


def test_a_tree_is_read_as_it_was_written_in_another_mapping_too() -> None:
    file = make_board()
    ours, theirs = SharedTrees(file), SharedTrees(file)
    os.close(file)
    ours.write(7, TREE)
    assert theirs.read(7) == TREE
    assert theirs.read(8) is None


def test_two_sessions_of_one_place_take_turns_and_are_never_mixed_up(board: SharedTrees) -> None:
    board.write(7, TREE)
    board.write(7 + NUM_RECORDS, replace(TREE, committed_len=99))
    assert board.read(7) is None
    other = board.read(7 + NUM_RECORDS)
    assert other is not None
    assert other.committed_len == 99


def test_a_session_that_lives_long_keeps_its_place_to_itself_while_there_are_others() -> None:
    numbers = SessionNumbers()
    first = numbers.take()
    for _ in range(3 * NUM_RECORDS):
        later = numbers.take()
        assert later % NUM_RECORDS != first % NUM_RECORDS
        numbers.free(later)
    numbers.free(first)
    held = [numbers.take() for _ in range(NUM_RECORDS)]
    assert len({each % NUM_RECORDS for each in held}) == NUM_RECORDS
    beyond = numbers.take()
    assert beyond == held[-1] + 1
    # Whose place it shares is no holder any more, and frees nothing.
    numbers.free(next(each for each in held if each % NUM_RECORDS == beyond % NUM_RECORDS))
    assert numbers.take() == beyond + 1
    numbers.free_all()
    assert numbers.take() == beyond + 2


def test_of_a_tree_with_too_many_nodes_the_first_are_kept(board: SharedTrees) -> None:
    count = MOST_NODES + 9
    chain = replace(TREE, weights=[-0.1] * count, token_ids=[*range(count)], parents=[ROOT, *range(count - 1)])
    board.write(1, chain)
    found = board.read(1)
    assert found is not None
    assert len(found.parents) == len(found.token_ids) == MOST_NODES


def test_a_record_that_has_changed_anywhere_is_not_taken_for_a_tree(board: SharedTrees) -> None:
    board.write(0, TREE)
    for place in range(56 + 16 * len(TREE.parents)):
        board._memory[place] ^= 0x41
        assert board.read(0) is None
        board._memory[place] ^= 0x41
    assert board.read(0) == TREE


def test_a_reader_beside_a_writer_sees_whole_trees_or_none(board: SharedTrees) -> None:
    trees = [TREE, replace(TREE, committed_len=21, token_ids=[50, 60, 80, 70, 90])]
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            for tree in trees:
                board.write(3, tree)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [board.read(3) for _ in range(3000)]
    finally:
        over.set()
        writer.join()
    assert all(tree is None or tree in trees for tree in found)
    assert any(found)


@pytest.mark.parametrize(
    ("new", "most", "token_ids", "expected"),
    [
        ([], 7, [5, 6, 7], 1 + 0.9 + 0.8 + 0.7),
        ([], 2, [5, 6], 1 + 0.9 + 0.8),
        ([5], 7, [6, 7], 1 + (0.8 + 0.7) / 0.9),
        ([5, 8], 7, [9], 1 + 0.25 / 0.3),
        ([5, 6, 7], 7, [], 1.0),
        ([4], 7, [], 1.0),
        ([5, 7], 7, [], 1.0),
        ([5, 6, 7, 1], 7, [], 1.0),
        ([], 0, [], 1.0),
    ],
)
def test_the_best_chain_below_what_was_committed_is_at_hand(
    new: list[int], most: int, token_ids: list[int], expected: float
) -> None:
    found = TREE.at_hand(new, most)
    assert found.token_ids == token_ids
    assert found.expected == pytest.approx(expected)


def test_guesses_that_may_not_follow_or_do_not_pay_are_left_out() -> None:
    masked = replace(TREE, weights=[TREE.weights[0], -math.inf, *TREE.weights[2:]])
    assert masked.at_hand([], 7).token_ids == [5, 8, 9]
    # What hangs below it was never judged.
    assert masked.at_hand([5, 6], 7).token_ids == []
    assert replace(TREE, least=0.75).at_hand([], 7).token_ids == [5, 6]


def test_a_step_waits_for_nodes_by_what_they_add_and_take() -> None:
    # All that was guessed has been used up, or the text has left it: the next node is half a token in a quarter step.
    for new in ([5, 6, 7], [4]):
        assert TREE.at_hand(new, 7) == ReadyDrafts([], 1.0, 0.5, 0.25)
    assert worth_waiting([TREE.at_hand([4], 7)])
    assert not worth_waiting([replace(TREE, wait_share=0.75).at_hand([4], 7)])
    # The drafter does not draft what is less likely; what a step verifies is another matter.
    assert not worth_waiting([replace(TREE, price=0.6).at_hand([4], 7)])
    assert worth_waiting([replace(TREE, least=0.9).at_hand([4], 7)])
    # Others have enough to go on with.
    assert not worth_waiting([TREE.at_hand([4], 7), TREE.at_hand([], 7)])
    # Nothing is to come, or there is no room for more.
    assert not worth_waiting([replace(TREE, wait_share=math.nan).at_hand([4], 7)])
    assert TREE.at_hand([], 2).gain == 0.0


@given(
    st.lists(st.tuples(st.integers(-1, 11), st.integers(0, 3), st.floats(0.05, 1.0)), max_size=12),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(1, 6),
)
def test_chain_and_prospects_are_those_of_the_forest_after_the_same_commit(
    guesses: list[tuple[int, int, float]], new: list[int], most: int
) -> None:
    forest = Forest((DRAFT_MODEL,))
    row = forest.take_row()
    forest.open(row, [1, 2, 3])
    forest.judge(row, 0, -1)
    for parent, token, confidence in guesses:
        if parent < forest.count(row):
            forest.add(row, parent, token, confidence, 0)
    nodes = forest.arrays.nodes[row, : forest.count(row)]
    tree = BoardTree(
        committed_len=3,
        least=0.0,
        price=0.0,
        child_share=0.5,
        wait_share=0.1,
        weights=nodes["weight"].tolist(),
        token_ids=nodes["token"].tolist(),
        parents=nodes["parent"].tolist(),
    )
    if new:
        forest.commit(rows_of([row]), rows_of([len(new)]), rows_of(new))
    rows, caps, chains = rows_of([row]), rows_of([most]), np.ones(1, np.bool_)
    picked = forest.best(rows, caps, chains)
    expected, gains = forest.expected_gains(rows, caps, np.zeros(1), np.full(1, 0.5), chains)
    found = tree.at_hand(new, most)
    slots = [slot for slot in picked.slots[0].tolist() if slot >= 0]
    assert found.token_ids == [int(forest.arrays.nodes[row, slot]["token"]) for slot in slots]
    assert found.expected == pytest.approx(float(expected[0]))
    assert found.gain == pytest.approx(float(gains[0]))
