"""Buckets: every row finds its lane, every lane its nodes, and what does not fit is not squeezed in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.torch.static_batch import LANE_ROWS, MAX_SLOTS, NODES, Bucket, StaticInputs, plan_static
from tests.unit.engine.tiny_models import Row, chain, pack
from tests.unit.engine.traffic import ALL_BLOCKS, Traffic


def staged(batch):
    """A batch's bucket and what a step of it reads, as arrays."""
    plan = plan_static(batch)
    assert plan is not None
    inputs = StaticInputs(torch.device("cpu"), trash_block=ALL_BLOCKS)
    inputs._host.fill_(-77)
    inputs.stage(plan, batch)
    views = inputs.views(plan.bucket)
    return plan.bucket, {name: getattr(views, name).numpy() for name in plan.bucket.shapes}


@pytest.mark.parametrize("seed", range(6))
def test_each_row_lies_in_one_cell_of_a_lane_of_its_sequence_and_sees_its_own_slots(seed):
    traffic = Traffic(seed)
    for _ in range(20):
        batch = traffic.step(25)
        bucket, fields = staged(batch)
        cells = list(zip(fields["lane_of"], fields["cell_of"], strict=True))[: batch.num_rows]
        assert len(set(cells)) == batch.num_rows
        for row, (lane, cell) in enumerate(cells):
            assert fields["lane_rows"][lane, cell] == row
            blocks = -(-batch.context_lens[row] // BLOCK_SIZE)
            own = batch.block_tables[batch.sequences[row], :blocks]
            assert fields["tables"][lane, :blocks].tolist() == own.tolist()
            bits = int(fields["node_bits"][row]) & (2**64 - 1)
            seen = {int(fields["node_slots"][lane, node]) for node in range(bucket.nodes) if bits >> node & 1}
            assert seen == set(batch.ancestors[row, : batch.num_ancestors[row]].tolist())
            assert bits.bit_count() == batch.num_ancestors[row]
        assert all((field != -77).all() for field in fields.values())


def test_batches_that_differ_in_values_only_share_a_bucket():
    traffic = Traffic(0)
    batches = [pack(chain([5, 6, 7], start, 0), [traffic.tables[each]]) for start, each in ((0, 1), (60, 2))]
    assert {plan_static(batch).bucket for batch in batches} == {Bucket(rows=4, lanes=1, lane_rows=4, blocks=8, nodes=0)}


def test_padded_rows_write_to_the_trash_and_attend_one_slot():
    bucket, fields = staged(pack(chain([5, 6, 7, 8, 9]), [[3]]))
    assert bucket.rows == 8
    assert fields["slots"][5:].tolist() == [ALL_BLOCKS * BLOCK_SIZE] * 3
    assert fields["contexts"].tolist() == [1, 2, 3, 4, 5, 1, 1, 1]
    assert fields["lane_rows"][0].tolist() == [0, 1, 2, 3, 4] + [0] * 11


def test_a_table_longer_than_what_is_attended_does_not_widen_the_bucket():
    bucket, fields = staged(pack(chain([5]), [list(range(40))]))
    assert (bucket.blocks, fields["tables"].shape) == (8, (1, 8))


def wide_row(depth, first_slot=1000):
    return Row(token_id=4, position=10, ancestors=tuple(range(first_slot, first_slot + depth)), context_len=5)


def test_lanes_get_narrower_until_their_nodes_fit():
    rows = [wide_row(5, 1000 + 5 * index) for index in range(16)]
    bucket, _ = staged(pack(rows, [[1]]))
    assert bucket == Bucket(rows=16, lanes=4, lane_rows=4, blocks=8, nodes=64)


def test_the_last_bit_of_a_mask_counts_and_one_more_node_is_too_many():
    bucket, fields = staged(pack([wide_row(NODES[-1])], [[1]]))
    assert (bucket.nodes, fields["node_bits"].tolist()) == (64, [-1])
    assert plan_static(pack([wide_row(NODES[-1] + 1)], [[1]])) is None


def test_what_would_gather_too_much_or_has_too_many_rows_is_not_static():
    blocks = MAX_SLOTS // BLOCK_SIZE // 16
    tables = [[0] * blocks] * 17
    long_rows = [Row(token_id=4, position=blocks * BLOCK_SIZE - 1, sequence=each) for each in range(17)]
    assert plan_static(pack(long_rows[:16], tables)).bucket.num_slots == MAX_SLOTS
    assert plan_static(pack(long_rows, tables)) is None
    assert plan_static(pack(chain([3] * 257), [list(range(17))])) is None


def test_the_largest_buckets_fit_the_buffer():
    rows = [Row(token_id=4, position=9, sequence=each, ancestors=wide_row(64).ancestors) for each in range(240)]
    rows += chain([3] * LANE_ROWS[-1], 0, 240)
    bucket, _ = staged(pack(rows, [[1]] * 241))
    assert bucket == Bucket(rows=256, lanes=256, lane_rows=16, blocks=8, nodes=64)
    room = len(StaticInputs(torch.device("cpu"), 1)._host)
    largest = Bucket(rows=256, lanes=256, lane_rows=16, blocks=MAX_SLOTS // BLOCK_SIZE // 256, nodes=64)
    assert sum(int(np.prod(shape)) for shape in largest.shapes.values()) <= room
