"""Batches padded to a few fixed shapes, and the buffers from which a step of such a shape reads all it needs.

A *lane* is up to `lane_rows` rows of one sequence; its context is gathered once for all of them. A sequence with
more rows takes several lanes. A lane sees the pages of its sequence and up to 64 tree nodes, of which each row
attends the ones in its 64-bit mask. Nothing here runs a model or needs CUDA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.torch.layers import TorchRows
from paceline.engine.batch import Batch

Ints = npt.NDArray[np.int64]
Buffer = TypeVar("Buffer", Ints, torch.Tensor)

MAX_ROWS: Final = 256
LANE_ROWS: Final = (1, 4, 16)
NODES: Final = (0, 16, 64)
MIN_BLOCKS: Final = 8
# Slots that all lanes of a step gather, padding included: 1 GB a layer of 8 KV heads of 128 in bfloat16.
MAX_SLOTS: Final = 1 << 18
# What `Bucket.shapes` adds up to at most, in int64 words.
_MAX_WORDS: Final = 8 * MAX_ROWS + MAX_ROWS * (LANE_ROWS[-1] + NODES[-1]) + MAX_SLOTS // BLOCK_SIZE
# More than any slot number: lane and slot fit one int64.
_SLOT_SPAN: Final = 1 << 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A shape of a step; all that differs between two batches of one bucket is the buffers' content."""

    rows: int
    lanes: int
    lane_rows: int
    blocks: int
    nodes: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the fields of `StaticRows`, in the order in which they lie in the buffer."""
        per_row = ("token_ids", "positions", "slots", "logit_rows", "contexts", "node_bits", "lane_of", "cell_of")
        return {
            **dict.fromkeys(per_row, (self.rows,)),
            "lane_rows": (self.lanes, self.lane_rows),
            "tables": (self.lanes, self.blocks),
            "node_slots": (self.lanes, self.nodes),
        }

    @property
    def num_slots(self) -> int:
        """Slots that the lanes gather."""
        return self.lanes * (self.blocks * BLOCK_SIZE + self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticRows:
    """Views of a buffer, all int64.

    Attributes:
        token_ids: [rows], and so positions, slots and logit_rows, as in `Batch`; padded rows write to the trash.
        contexts: [rows], positions of its sequence that a row attends.
        node_bits: [rows], bit n set where the row attends node n of its lane.
        lane_of: [rows], lane of each row; and cell_of, its place there.
        lane_rows: [lanes, lane_rows], the row in each cell; free cells repeat the first one's.
        tables: [lanes, blocks], of each lane's sequence.
        node_slots: [lanes, nodes], slots of the lane's nodes; the rest repeats the lane's first slot.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    contexts: torch.Tensor
    node_bits: torch.Tensor
    lane_of: torch.Tensor
    cell_of: torch.Tensor
    lane_rows: torch.Tensor
    tables: torch.Tensor
    node_slots: torch.Tensor

    @property
    def rows(self) -> TorchRows:
        return TorchRows(
            token_ids=self.token_ids, positions=self.positions, slots=self.slots, logit_rows=self.logit_rows
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticPlan:
    """Where the rows of a batch go.

    Attributes:
        lane_of: int64 [rows]; and cell_of.
        firsts: int64 [lanes], a row of each lane.
        node_bits: int64 [rows].
        nodes: Lane, index there and slot of each lane's nodes, int64 [n] each.
    """

    bucket: Bucket
    lane_of: Ints
    cell_of: Ints
    firsts: Ints
    node_bits: Ints
    nodes: tuple[Ints, Ints, Ints]


def plan_static(batch: Batch) -> StaticPlan | None:
    """Finds the bucket of a batch and places its rows; None when it is too large for any."""
    rows = max(batch.num_rows, len(batch.logit_rows))
    if not batch.num_rows or rows > MAX_ROWS:
        return None
    widest = min(int(np.bincount(batch.sequences).max()), LANE_ROWS[-1])
    fitting = [size for size in LANE_ROWS if size >= widest]
    # Fewer rows a lane need fewer nodes.
    for lane_rows in (fitting[0], *(size for size in reversed(LANE_ROWS) if size < fitting[0])):
        lane_of, cell_of, firsts = _place_rows(batch.sequences, lane_rows)
        node_bits, nodes = _place_nodes(batch, lane_of)
        most = int(nodes[1].max(initial=-1)) + 1
        if most <= NODES[-1]:
            break
    else:
        return None
    bucket = Bucket(
        rows=bucket_rows(rows),
        lanes=_power(len(firsts)),
        lane_rows=lane_rows,
        blocks=max(MIN_BLOCKS, _power(-(-int(batch.context_lens.max()) // BLOCK_SIZE))),
        nodes=next(size for size in NODES if size >= most),
    )
    if bucket.num_slots > MAX_SLOTS:
        return None
    return StaticPlan(bucket=bucket, lane_of=lane_of, cell_of=cell_of, firsts=firsts, node_bits=node_bits, nodes=nodes)


def bucket_rows(count: int) -> int:
    """Rows of the bucket for a batch of `count` rows; larger batches are not padded."""
    return _power(count) if count <= MAX_ROWS else count


def _power(count: int) -> int:
    """The power of two from `count` up."""
    return 1 << max(0, count - 1).bit_length()


def _place_rows(sequences: npt.NDArray[np.int32], lane_rows: int) -> tuple[Ints, Ints, Ints]:
    """Lane and cell of each row [rows], in batch order within a sequence, and a row of each lane [lanes]."""
    order = np.argsort(sequences, kind="stable")
    starts = np.flatnonzero(np.diff(sequences[order], prepend=-1))
    counts = np.diff(starts, append=len(order))
    cells = (np.arange(len(order)) - np.repeat(starts, counts)) % lane_rows
    lane_of, cell_of = np.empty_like(order), np.empty_like(order)
    lane_of[order], cell_of[order] = np.cumsum(cells == 0) - 1, cells
    return lane_of, cell_of, order[cells == 0]


def _place_nodes(batch: Batch, lane_of: Ints) -> tuple[Ints, tuple[Ints, Ints, Ints]]:
    """Masks [rows] over the nodes of each row's lane, and lane, index and slot [n] of these nodes."""
    used = np.arange(batch.ancestors.shape[1]) < batch.num_ancestors[:, None]
    keyed = lane_of[:, None] * _SLOT_SPAN + batch.ancestors
    nodes, place = np.unique(keyed[used], return_inverse=True)
    lanes, slots = nodes // _SLOT_SPAN, nodes % _SLOT_SPAN
    index = np.arange(len(nodes)) - np.searchsorted(lanes, lanes)
    bits = np.zeros(used.shape, np.uint64)
    # Masks of a lane with too many nodes are nonsense, and the plan is not used.
    bits[used] = np.left_shift(np.uint64(1), (index % 64).astype(np.uint64))[place]
    return np.bitwise_or.reduce(bits, axis=1).view(np.int64), (lanes, index, slots)


class StaticInputs:
    """One buffer of int64 words on the host, pinned for CUDA, and one on the device; the same one on the CPU.

    Args:
        device: Where steps run.
        trash_block: Where padded rows write.
    """

    def __init__(self, device: torch.device, trash_block: int) -> None:
        on_cuda = device.type == "cuda"
        self._trash_block = trash_block
        self._host = torch.zeros(_MAX_WORDS, dtype=torch.int64, pin_memory=on_cuda)
        self._device = torch.zeros_like(self._host, device=device) if on_cuda else self._host
        self._copied = torch.cuda.Event() if on_cuda else None

    def stage(self, plan: StaticPlan, batch: Batch) -> None:
        """Fills the buffer with a batch: one copy to the device, which the host does not wait for."""
        if self._copied is not None:
            # The copy before must have left the host's buffer.
            self._copied.synchronize()
        used = _fill(_split(self._host.numpy(), plan.bucket), plan, batch, self._trash_block)
        if self._copied is not None:
            self._device[:used].copy_(self._host[:used], non_blocking=True)
            self._copied.record()

    def views(self, bucket: Bucket) -> StaticRows:
        """Where a step of this bucket reads; the same memory every time."""
        return StaticRows(**_split(self._device, bucket))


def _split(buffer: Buffer, bucket: Bucket) -> dict[str, Buffer]:
    """Views of a buffer by field."""
    views: dict[str, Buffer] = {}
    start = 0
    for name, shape in bucket.shapes.items():
        stop = start + math.prod(shape)
        views[name] = buffer[start:stop].reshape(shape)
        start = stop
    return views


def _fill(fields: dict[str, Ints], plan: StaticPlan, batch: Batch, trash_block: int) -> int:
    """Writes a batch and its padding; returns the words used."""
    rows, lanes = batch.num_rows, len(plan.firsts)
    trash = trash_block * BLOCK_SIZE
    # A padded row attends the first slot of its lane, and nobody looks at the result.
    values: dict[str, tuple[npt.NDArray[np.integer[Any]], int]] = {
        "token_ids": (batch.token_ids, 0),
        "positions": (batch.positions, 0),
        "slots": (batch.slots, trash),
        "logit_rows": (batch.logit_rows, 0),
        "contexts": (batch.context_lens, 1),
        "node_bits": (plan.node_bits, 0),
        "lane_of": (plan.lane_of, 0),
        "cell_of": (plan.cell_of, 0),
    }
    for name, (value, padding) in values.items():
        fields[name][: len(value)], fields[name][len(value) :] = value, padding
    fields["lane_rows"][lanes:] = 0
    fields["lane_rows"][:lanes] = plan.firsts[:, None]
    fields["lane_rows"][plan.lane_of, plan.cell_of] = np.arange(rows)
    width = min(batch.block_tables.shape[1], plan.bucket.blocks)
    fields["tables"][:] = trash_block
    fields["tables"][:lanes, :width] = batch.block_tables[batch.sequences[plan.firsts], :width]
    fields["node_slots"][:] = fields["tables"][:, :1] * BLOCK_SIZE
    lane_of_node, index, slots = plan.nodes
    fields["node_slots"][lane_of_node, index] = slots
    return sum(field.size for field in fields.values())
