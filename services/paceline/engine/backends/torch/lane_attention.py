"""Attention of padded rows over lanes of gathered pages and tree nodes, in operations of static shape.

What a layer does not change (which slots a lane gathers, and which of them each row attends) is computed once a
step on the device, from the buffers of `static_batch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.torch.static_batch import StaticRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """Lanes of a step; slots are pages first, then nodes.

    Attributes:
        rows: int64 [lanes, lane_rows], the row in each cell.
        lane_of: int64 [rows]; and cell_of.
        block: int64 [lanes, slots], block of each slot; and offset, its place there.
        bias: [lanes, 1, lane_rows * group, slots], 0 where the row's head attends the slot, else -inf.
    """

    rows: torch.Tensor
    lane_of: torch.Tensor
    cell_of: torch.Tensor
    block: torch.Tensor
    offset: torch.Tensor
    bias: torch.Tensor


def build_lanes(rows: StaticRows, *, group: int, dtype: torch.dtype) -> Lanes:
    """Prepares the attention of all layers; `group` query heads share a KV head of kind `dtype`."""
    device = rows.tables.device
    contexts = rows.contexts[rows.lane_rows]
    pages = (rows.tables[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten(1)
    positions = torch.arange(pages.shape[1], device=device)
    # Slots that no row of the lane attends may hold NaN of somebody else; a weight of 0 would not hide it.
    pages = torch.where(positions < contexts.amax(dim=1, keepdim=True), pages, pages[:, :1])
    bits = rows.node_bits[rows.lane_rows][:, :, None] >> torch.arange(rows.node_slots.shape[1], device=device)
    attends = torch.cat((positions < contexts[:, :, None], (bits & 1).bool()), dim=2)
    bias = torch.zeros_like(attends, dtype=dtype).masked_fill(~attends, -torch.inf)
    slots = torch.cat((pages, rows.node_slots), dim=1)
    return Lanes(
        rows=rows.lane_rows,
        lane_of=rows.lane_of,
        cell_of=rows.cell_of,
        block=slots // BLOCK_SIZE,
        offset=slots % BLOCK_SIZE,
        bias=bias.repeat_interleave(group, dim=1)[:, None],
    )


def attend_lanes(
    lanes: Lanes, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scale: float
) -> torch.Tensor:
    """Attention of every row.

    Heads that share a KV head stand beside one another as rows, so that no kernel need know of groups.

    Args:
        lanes: From `build_lanes`.
        query: [rows, H, D].
        keys: One layer, [blocks, G, D, BLOCK_SIZE].
        values: One layer, [blocks, G, BLOCK_SIZE, D].
        scale: Factor of the scores.

    Returns:
        [rows, H, D] in the kind of the cache.
    """
    kv_heads = keys.shape[1]
    grouped = query.to(keys.dtype).unflatten(1, (kv_heads, -1))
    # [G, lanes, lane_rows, H / G, D] -> [lanes, G, lane_rows * H / G, D], without another copy.
    laned = grouped.transpose(0, 1)[:, lanes.rows].transpose(0, 1).flatten(2, 3)
    attended = torch.nn.functional.scaled_dot_product_attention(
        laned,
        keys[lanes.block, :, :, lanes.offset].transpose(1, 2),
        values[lanes.block, :, lanes.offset].transpose(1, 2),
        attn_mask=lanes.bias,
        scale=scale,
    )
    cells: torch.Tensor = attended.unflatten(2, (lanes.rows.shape[1], -1))
    return cells[lanes.lane_of, :, lanes.cell_of].flatten(1, 2)
