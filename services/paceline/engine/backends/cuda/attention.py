"""Paged attention of rows over their sequence's pages and a tree of drafts; nothing is gathered.

A single kernel serves plain decoding, verification, drafting and prompt chunks. It reads the cache through block
tables. Lengths, nodes and how contexts are divided are data: a recorded step knows how many rows it has, and no more.

A *lane* is up to `width` rows of one sequence. The query heads that share a KV head stand beside one another, so that
a lane is the rows of one matrix product. A *part* is a stretch of a lane's context, the work of one program for each KV
head: long contexts are divided until the parts fill the chip, and `_join` adds up what they find.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from paceline.core import pages
from paceline.engine.backends.cuda.launch import PROGRAMS, kernel, launch, power_of_two, require_contiguous

NODES: Final = 64
"""Most tree nodes that the rows of a lane see; a bit each."""
# Contexts are divided at multiples of this many positions.
_STRETCH: Final = 64
_LOG2_E: Final = 1.4426950408889634
_BLOCK_SIZE: Final = tl.constexpr(pages.BLOCK_SIZE)
_MOST_NODES: Final = tl.constexpr(NODES)
_NODE_TILE: Final = tl.constexpr(16)
_JOINED: Final = tl.constexpr(8)

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Where the rows of a step find what they attend, on the device; int32 unless said otherwise.

    Attributes:
        contexts: [rows], positions of its sequence that a row attends.
        node_bits: int64 [rows], bit n set where the row attends node n of its lane.
        row_parts: [rows, 2], see `Parts`.
        lane_rows: [lanes, width], the rows of each lane; -1: none.
        lane_starts: [lanes], where the blocks of each lane's sequence begin in `tables`.
        lane_nodes: [lanes], how many nodes each lane has.
        node_slots: [lanes, NODES], slots of the lane's nodes.
        parts: [most_parts(lanes, kv_heads), 4], see `Parts`.
        tables: [n], blocks.
    """

    contexts: torch.Tensor
    node_bits: torch.Tensor
    row_parts: torch.Tensor
    lane_rows: torch.Tensor
    lane_starts: torch.Tensor
    lane_nodes: torch.Tensor
    node_slots: torch.Tensor
    parts: torch.Tensor
    tables: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the contexts of a step are divided, on the host; see `divide`.

    Attributes:
        parts: int32 [n, 4]: lane, first position, the one behind the last, and where what it finds is kept until it is
            joined; -1: it is all of its lane's context.
        lanes: int32 [lanes, 2]: where what a lane's first part finds is kept, and the number of its parts; 0: its one
            part needs no joining.
    """

    parts: Ints
    lanes: Ints


def most_parts(lanes: int, kv_heads: int) -> int:
    """Parts that there may be of up to `lanes` lanes: what `Lanes.parts` must have room for, -1 behind the last."""
    return lanes + _fill(kv_heads)


def _fill(kv_heads: int) -> int:
    """Parts that fill the chip."""
    return -(-PROGRAMS // kv_heads)


def divide(longest: npt.NDArray[np.integer[Any]], kv_heads: int) -> Parts:
    """Divides contexts so that all parts together fill the chip, however they differ in length.

    Args:
        longest: [lanes], the longest context of the rows of each lane.
        kv_heads: The model's KV heads.
    """
    stretches = np.maximum(1, -(-longest // _STRETCH))
    each = max(1, -(-int(stretches.sum()) // _fill(kv_heads)))
    counts = -(-stretches // each)
    lane = np.repeat(np.arange(len(counts)), counts)
    first = (np.arange(len(lane)) - np.repeat(np.cumsum(counts) - counts, counts)) * (each * _STRETCH)
    kept = np.where(counts > 1, counts, 0)
    place = np.where(kept[lane] > 0, np.cumsum(kept[lane] > 0) - 1, -1)
    stop = np.minimum(first + each * _STRETCH, longest[lane])
    return Parts(
        parts=np.stack((lane, first, stop, place), axis=1).astype(np.int32),
        lanes=np.stack((np.cumsum(kept) - kept, kept), axis=1).astype(np.int32),
    )


def row_parts(
    parts: Parts, lane_of: npt.NDArray[np.integer[Any]], cell_of: npt.NDArray[np.integer[Any]], width: int
) -> Ints:
    """Values of `Lanes.row_parts` for rows at these places [rows]; 0 for a padding row.

    Where the row's share of its lane's first part is kept, in rows, and the number of parts.
    """
    kept, counts = parts.lanes[lane_of].T
    return np.stack((kept * width + cell_of, counts), axis=1).astype(np.int32)


def attend(lanes: Lanes, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of every row; what is returned for rows of no lane means nothing. Two launches.

    Args:
        query: [rows, H, D].
        keys: Of one layer, [blocks, G, BLOCK_SIZE, D], in the kind of the query; and values.
        scale: Factor of the scores.

    Returns:
        [rows, H, D], in the kind of the query.
    """
    require_contiguous(query=query, keys=keys, values=values)
    (rows, heads, dim), kv_heads = query.shape, keys.shape[1]
    count, width = lanes.lane_rows.shape
    group, out = heads // kv_heads, torch.empty_like(query)
    # Fewer than two parts of a lane are never kept: it is at most twice what fills the chip.
    kept_rows = 2 * _fill(kv_heads) * width
    found = query.new_empty((kept_rows, heads, dim), dtype=torch.float32)
    sums = query.new_empty((kept_rows, heads, 2), dtype=torch.float32)
    shape = {"HEADS": heads, "GROUP": group, "D": dim, "PADDED_D": power_of_two(dim, 16), "WIDTH": width}
    launch(
        _attend, (most_parts(count, kv_heads), kv_heads), query, keys, values, out, found, sums, lanes.lane_rows,
        lanes.lane_starts, lanes.lane_nodes, lanes.node_slots, lanes.tables, lanes.contexts, lanes.node_bits,
        lanes.parts, scale * _LOG2_E, **shape, **_tiles(width * group, dim, query.element_size()),
    )  # fmt: skip
    launch(
        _join, (rows, kv_heads), found, sums, out, lanes.row_parts, **shape,
        PADDED_GROUP=power_of_two(group), num_warps=4,
    )  # fmt: skip
    return out


def _tiles(cells: int, dim: int, bytes_each: int) -> dict[str, int]:
    """Sizes of products: so that nothing is spilled, and tiles of three steps fit the shared memory from sm80 on.

    float32 is multiplied without tensor cores, and takes more registers.
    """
    padded = power_of_two(cells, 16)
    tile = max(16, min(64, 32768 // (power_of_two(dim) * bytes_each**2)))
    return {"M": padded, "TILE": tile, "num_warps": 4 if padded * bytes_each <= 32 else 8, "num_stages": 3}


@kernel
def _attend(
    query, keys, values, out, found, sums, lane_rows, lane_starts, lane_nodes, node_slots, tables, contexts, node_bits,
    parts, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A part of one lane's context for one KV head; the last part has the nodes, too."""
    part, head = tl.program_id(0), tl.program_id(1)
    lane = tl.load(parts + 4 * part)
    if lane < 0:
        return
    cell, dims = tl.arange(0, M) // GROUP, tl.arange(0, PADDED_D)
    row = tl.load(lane_rows + lane * WIDTH + cell, mask=cell < WIDTH, other=-1)
    real, inside = row >= 0, dims < D
    stored = real[:, None] & inside[None, :]
    at = (row * HEADS + head * GROUP + tl.arange(0, M) % GROUP)[:, None] * D + dims[None, :]
    q = tl.load(query + at, mask=stored, other=0.0)
    context = tl.load(contexts + row, mask=real, other=0)
    best, total, acc = _nothing(M, PADDED_D)
    first, stop = tl.load(parts + 4 * part + 1), tl.load(parts + 4 * part + 2)
    table = tables + tl.load(lane_starts + lane)
    kv_head, heads = head * _BLOCK_SIZE, HEADS // GROUP * _BLOCK_SIZE
    for start in range(first, stop, TILE):
        position = start + tl.arange(0, TILE)
        there = position < stop
        block = tl.load(table + position // _BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        lies = (block * heads + kv_head + position % _BLOCK_SIZE)[:, None] * D + dims[None, :]
        seen = position[None, :] < context[:, None]
        best, total, acc = _add(q, keys + lies, values + lies, there, seen, inside, scale, best, total, acc)
    if stop == tl.max(context, 0):
        bits, num_nodes = tl.load(node_bits + row, mask=real, other=0), tl.load(lane_nodes + lane)
        for start in range(0, num_nodes, _NODE_TILE):
            node = start + tl.arange(0, _NODE_TILE)
            there = node < num_nodes
            slot = tl.load(node_slots + lane * _MOST_NODES + node, mask=there, other=0).to(tl.int64)
            lies = (slot // _BLOCK_SIZE * heads + kv_head + slot % _BLOCK_SIZE)[:, None] * D + dims[None, :]
            seen = there[None, :] & (((bits[:, None] >> node[None, :]) & 1) != 0)
            best, total, acc = _add(q, keys + lies, values + lies, there, seen, inside, scale, best, total, acc)
    place = tl.load(parts + 4 * part + 3)
    if place < 0:
        tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=stored)
    else:
        kept = (place * WIDTH + cell) * HEADS + head * GROUP + tl.arange(0, M) % GROUP
        tl.store(found + kept[:, None] * D + dims[None, :], acc, mask=stored)
        tl.store(sums + 2 * kept, best, mask=real)
        tl.store(sums + 2 * kept + 1, total, mask=real)


@kernel
def _nothing(M: tl.constexpr, PADDED_D: tl.constexpr):
    """A softmax over no slots: largest scores, sums of weights, weighted sums of values."""
    return tl.full((M,), -float("inf"), tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, PADDED_D), tl.float32)


@kernel
def _add(q, keys, values, there, seen, inside, scale, best, total, acc):
    """Softmax over a few more slots, online. What is not there is never read: it may hold NaN of somebody else."""
    some = there[:, None] & inside[None, :]
    key = tl.load(keys, mask=some, other=0.0)
    score = tl.where(seen, tl.dot(q, tl.trans(key), input_precision="ieee") * scale, -float("inf"))
    new_best = tl.maximum(best, tl.max(score, 1))
    # Where nothing was seen yet, -inf - -inf would be NaN.
    base = tl.where(new_best == -float("inf"), 0.0, new_best)
    weight = tl.exp2(score - base[:, None])
    kept = tl.exp2(best - base)
    value = tl.load(values, mask=some, other=0.0)
    acc = acc * kept[:, None] + tl.dot(weight.to(value.dtype), value, input_precision="ieee")
    return new_best, total * kept + tl.sum(weight, 1), acc


@kernel
def _join(
    found, sums, out, row_parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr, WIDTH: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
):  # fmt: skip
    """The parts of one row together, for the heads of one KV head."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    count = tl.load(row_parts + 2 * row + 1)
    if count == 0:
        return
    member, dims = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_D)
    head, mine = kv_head * GROUP + member, member < GROUP
    best = tl.full((PADDED_GROUP,), -float("inf"), tl.float32)
    total = tl.zeros((PADDED_GROUP,), tl.float32)
    acc = tl.zeros((PADDED_GROUP, PADDED_D), tl.float32)
    kept = tl.load(row_parts + 2 * row)
    for start in range(0, count, _JOINED):
        part = start + tl.arange(0, _JOINED)
        at = (kept + part * WIDTH)[:, None] * HEADS + head[None, :]
        there = (part < count)[:, None] & mine[None, :]
        highest = tl.load(sums + 2 * at, mask=there, other=-float("inf"))
        new_best = tl.maximum(best, tl.max(highest, 0))
        base = tl.where(new_best == -float("inf"), 0.0, new_best)
        # A part in which the row sees nothing has no weight.
        share, kept_share = tl.exp2(highest - base[None, :]), tl.exp2(best - base)
        sums_there = there[:, :, None] & (dims < D)[None, None, :]
        value = tl.load(found + at[:, :, None] * D + dims[None, None, :], mask=sums_there, other=0.0)
        acc = acc * kept_share[:, None] + tl.sum(value * share[:, :, None], 0)
        total = total * kept_share + tl.sum(tl.load(sums + 2 * at + 1, mask=there, other=0.0) * share, 0)
        best = new_best
    target = (row * HEADS + head)[:, None] * D + dims[None, :]
    tl.store(out + target, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine[:, None] & (dims < D)[None, :])
