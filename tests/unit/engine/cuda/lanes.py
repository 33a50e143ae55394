"""Lanes of a batch, made in the plainest way: row after row."""

from __future__ import annotations

import numpy as np
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cuda.attention import NODES, Lanes, divide, most_parts, row_parts
from paceline.engine.batch import Batch
from tests.unit.engine.cuda.interpreted import DEVICE


def lanes_of(batch: Batch, width: int, kv_heads: int, rows: int) -> Lanes:
    """The lanes of a batch, padded to `rows` rows and as many lanes."""
    lane_rows = np.full((rows, width), -1, np.int32)
    lane_of, cell_of = np.zeros((2, batch.num_rows), np.int32)
    open_lanes: dict[int, int] = {}
    used = np.zeros(rows, np.int32)
    for row, sequence in enumerate(batch.sequences.tolist()):
        if sequence not in open_lanes or used[open_lanes[sequence]] == width:
            open_lanes[sequence] = int((used > 0).sum())
        lane = open_lanes[sequence]
        lane_of[row], cell_of[row], lane_rows[lane, used[lane]] = lane, used[lane], row
        used[lane] += 1
    num_lanes = int((used > 0).sum())
    longest = np.zeros(num_lanes, np.int32)
    np.maximum.at(longest, lane_of, batch.context_lens)
    bits, slots, counts = _nodes(batch, lane_of, rows)
    starts = np.zeros(rows, np.int32)
    starts[lane_of] = batch.sequences * batch.block_tables.shape[1]
    made = divide(longest, kv_heads)
    parts = np.full((most_parts(rows, kv_heads), 4), -1, np.int32)
    parts[: len(made.parts)] = made.parts
    joins = np.zeros((rows, 2), np.int32)
    joins[: batch.num_rows] = row_parts(made, lane_of, cell_of, width)
    contexts = np.zeros(rows, np.int32)
    contexts[: batch.num_rows] = batch.context_lens
    fields = {
        "contexts": contexts, "node_bits": bits, "row_parts": joins, "lane_rows": lane_rows, "lane_starts": starts,
        "lane_nodes": counts, "node_slots": slots, "parts": parts, "tables": batch.block_tables.ravel(),
    }  # fmt: skip
    return Lanes(**{name: torch.from_numpy(field).to(DEVICE) for name, field in fields.items()})


def _nodes(batch: Batch, lane_of: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bits of each row, and the slots of each lane's nodes and their number; lanes are as many as rows."""
    bits, slots, counts = np.zeros(rows, np.int64), np.zeros((rows, NODES), np.int32), np.zeros(rows, np.int32)
    for row, lane in enumerate(lane_of.tolist()):
        for slot in batch.ancestors[row, : batch.num_ancestors[row]].tolist():
            known = slots[lane, : counts[lane]].tolist()
            if slot not in known:
                slots[lane, counts[lane]] = slot
                counts[lane] += 1
            bits[row] |= np.int64(1) << slots[lane].tolist().index(slot, 0, counts[lane])
    return bits, slots, counts


def attended_slots(batch: Batch, row: int) -> np.ndarray:
    """Slots that a row attends, int64 [n]."""
    positions = np.arange(batch.context_lens[row])
    blocks = batch.block_tables[batch.sequences[row]][positions // BLOCK_SIZE].astype(np.int64)
    ancestors = batch.ancestors[row, : batch.num_ancestors[row]].astype(np.int64)
    return np.concatenate([blocks * BLOCK_SIZE + positions % BLOCK_SIZE, ancestors])
