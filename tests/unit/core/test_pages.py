"""Blocks are never lost, never held twice unawares, and never forgotten while somebody holds them."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core import pages
from paceline.core.errors import LocalProtocolError
from paceline.core.pages import BLOCK_SIZE, BlockPool, SessionPages, SlotPool, block_hash


def test_a_prefix_is_found_again_block_by_block_and_one_token_is_always_left():
    pool = BlockPool(8)
    tokens = list(range(BLOCK_SIZE * 3))
    first = SessionPages(tokens, pool)
    assert first.attach_cached_prefix() == 0
    assert first.reserve(len(tokens))
    first.mark_computed(len(tokens))
    second = SessionPages(list(tokens), pool)
    assert second.attach_cached_prefix() == BLOCK_SIZE * 2
    assert second.blocks == first.blocks[:2]
    other = SessionPages([99, *tokens[1:]], pool)
    assert other.attach_cached_prefix() == 0


def test_equal_blocks_after_different_prefixes_have_different_hashes():
    tokens = list(range(BLOCK_SIZE))
    assert block_hash(None, tokens) != block_hash(block_hash(None, tokens), tokens)


@pytest.mark.parametrize("released", [False, True])
def test_what_is_forgotten_is_never_found_again_and_no_block_is_lost(released: bool):
    pool = BlockPool(4)
    tokens = list(range(BLOCK_SIZE * 3))
    first = SessionPages(tokens, pool)
    assert first.reserve(len(tokens))
    first.mark_computed(len(tokens))
    blocks = list(first.blocks)
    if released:
        first.release()
        pool.forget(blocks)
    else:
        first.forget()
        first.release()
    assert SessionPages(list(tokens), pool).attach_cached_prefix() == 0
    assert not pool._block_of
    assert pool.allocate(4) is not None


def test_releasing_a_block_nobody_holds_is_refused():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(LocalProtocolError, match="does not hold"):
        pool.release(blocks)


def test_slots_run_out_and_come_back():
    pool = SlotPool(first_block=3, num_blocks=1)
    taken = [pool.take() for _ in range(BLOCK_SIZE)]
    assert sorted(taken) == list(range(3 * BLOCK_SIZE, 4 * BLOCK_SIZE))
    assert pool.take() is None
    pool.give_back(taken[0])
    assert pool.take() == taken[0]


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a tiny alphabet come, grow and go in a small pool."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.sequences: list[SessionPages] = []

    @rule(letters=st.lists(st.integers(0, 1), min_size=1, max_size=4), tail=st.integers(1, BLOCK_SIZE))
    def start(self, letters, tail):
        tokens = [letter for letter in letters for _ in range(BLOCK_SIZE)] + [7] * tail
        sequence = SessionPages(tokens, self.pool)
        sequence.attach_cached_prefix()
        if sequence.reserve(len(tokens)):
            sequence.mark_computed(len(tokens))
            self.sequences.append(sequence)
        else:
            sequence.release()

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 99), more=st.integers(1, 40))
    def grow(self, index, more):
        sequence = self.sequences[index % len(self.sequences)]
        before = len(sequence.blocks)
        if sequence.reserve(len(sequence.tokens) + more):
            sequence.tokens.extend([8] * more)
            sequence.mark_computed(len(sequence.tokens))
        else:
            assert len(sequence.blocks) == before

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 99))
    def stop(self, index):
        self.sequences.pop(index % len(self.sequences)).release()

    @invariant()
    def every_held_block_counts_once(self):
        assert self.pool.num_used == len({block for sequence in self.sequences for block in sequence.blocks})

    @invariant()
    def every_table_is_that_of_its_blocks(self):
        assert [sequence.table.tolist() for sequence in self.sequences] == [each.blocks for each in self.sequences]

    @rule()
    def none_is_lost(self):
        held = {block for sequence in self.sequences for block in sequence.blocks}
        fresh = self.pool.allocate(self.pool.num_blocks - len(held))
        assert fresh is not None
        assert not held & set(fresh)
        assert len(set(fresh)) == len(fresh)
        self.pool.release(fresh)

    @invariant()
    def only_blocks_with_equal_tokens_so_far_are_shared(self):
        seen: dict[int, list[int]] = {}
        for sequence in self.sequences:
            for index, block in enumerate(sequence.blocks):
                prefix = sequence.tokens[: (index + 1) * BLOCK_SIZE]
                assert seen.setdefault(block, prefix) == prefix


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_session_that_waits_for_pages_names_its_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, tokens = BlockPool(8), list(range(4 * BLOCK_SIZE))
    first, second = (SessionPages(tokens, pool) for _ in range(2))
    assert first.reserve(len(tokens))
    first.mark_computed(len(tokens))
    named = Mock(side_effect=pages.block_hash)
    monkeypatch.setattr(pages, "block_hash", named)
    for _ in range(3):
        assert second.attach_cached_prefix() == 3 * BLOCK_SIZE
        second.release()
    assert named.call_count == 3
