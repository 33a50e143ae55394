"""Attention of rows over paged KV and tree ancestors in torch operations; knows the cache layout, no models.

Rows are grouped by sequence, sequences of like row counts are padded to one another, and each group is one
call of scaled_dot_product_attention with a mask. The plan of a batch is made once on the host and used by
every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.batch import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """Sequences attended in one call.

    Attributes:
        rows: int64 [n, most_rows], batch rows of each sequence; padding repeats the first.
        real: bool [n, most_rows], false for padding.
        slots: int64 [n, most_slots], all slots that any row of the sequence attends; padding repeats the
            first.
        mask: bool [n, 1, most_rows, most_slots], true where the row attends the slot.
    """

    rows: torch.Tensor
    real: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _SequencePlan:
    rows: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]


def _plan_sequence(batch: Batch, sequence: int) -> _SequencePlan:
    rows = np.flatnonzero(batch.sequences == sequence)
    context_lens = batch.context_lens[rows]
    positions = np.arange(context_lens.max(), dtype=np.int64)
    blocks = batch.block_tables[sequence, positions // BLOCK_SIZE].astype(np.int64)
    prefix_mask = positions[None, :] < context_lens[:, None]
    used = np.arange(batch.ancestors.shape[1])[None, :] < batch.num_ancestors[rows][:, None]
    nodes = np.unique(batch.ancestors[rows][used]).astype(np.int64)
    node_mask = np.zeros((len(rows), len(nodes)), dtype=np.bool_)
    row_index, depth_index = np.nonzero(used)
    node_mask[row_index, np.searchsorted(nodes, batch.ancestors[rows][row_index, depth_index])] = True
    return _SequencePlan(
        rows=rows,
        slots=np.concatenate([blocks * BLOCK_SIZE + positions % BLOCK_SIZE, nodes]),
        mask=np.concatenate([prefix_mask, node_mask], axis=1),
    )


def _pad_group(plans: list[_SequencePlan], device: torch.device) -> GroupPlan:
    most_rows = max(len(plan.rows) for plan in plans)
    most_slots = max(len(plan.slots) for plan in plans)
    rows = np.empty((len(plans), most_rows), dtype=np.int64)
    real = np.zeros((len(plans), most_rows), dtype=np.bool_)
    slots = np.empty((len(plans), most_slots), dtype=np.int64)
    mask = np.zeros((len(plans), 1, most_rows, most_slots), dtype=np.bool_)
    for index, plan in enumerate(plans):
        num_rows, num_slots = plan.mask.shape
        rows[index], rows[index, :num_rows] = plan.rows[0], plan.rows
        real[index, :num_rows] = True
        slots[index], slots[index, :num_slots] = plan.slots[0], plan.slots
        mask[index, 0, :num_rows, :num_slots] = plan.mask
        # A padded row must attend something, or its softmax is 0 / 0.
        mask[index, 0, num_rows:, 0] = True
    return GroupPlan(
        rows=torch.from_numpy(rows).to(device),
        real=torch.from_numpy(real).to(device),
        slots=torch.from_numpy(slots).to(device),
        mask=torch.from_numpy(mask).to(device),
    )


def write_at(
    keys: torch.Tensor,
    values: torch.Tensor,
    place: tuple[torch.Tensor, torch.Tensor],
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """Writes new_keys and new_values [rows, G, D] to blocks and offsets [rows] of one layer's cache."""
    block, offset = place
    keys[block, :, :, offset] = new_keys.to(keys.dtype)
    values[block, :, offset] = new_values.to(values.dtype)


def plan_attention(batch: Batch, device: torch.device) -> list[GroupPlan]:
    """Groups sequences by the power of two above their row count, so that padding at most doubles."""
    groups: dict[int, list[_SequencePlan]] = {}
    for sequence in np.unique(batch.sequences):
        plan = _plan_sequence(batch, int(sequence))
        groups.setdefault((len(plan.rows) - 1).bit_length(), []).append(plan)
    return [_pad_group(plans, device) for plans in groups.values()]


def run_attention(
    plan: list[GroupPlan], query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of every row of a planned batch.

    Args:
        plan: From `plan_attention`, on the device of the tensors.
        query: [rows, H, D].
        keys: One layer, [blocks, G, D, BLOCK_SIZE].
        values: One layer, [blocks, G, BLOCK_SIZE, D].
        scale: Factor of the scores.

    Returns:
        [rows, H, D] in the query's dtype.
    """
    out = torch.empty_like(query)
    block_size = values.shape[2]
    for group in plan:
        block, offset = group.slots // block_size, group.slots % block_size
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[group.rows].transpose(1, 2).to(keys.dtype),
            keys[block, :, :, offset].transpose(1, 2),
            values[block, :, offset].transpose(1, 2),
            attn_mask=group.mask,
            scale=scale,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        out[group.rows[group.real]] = attended.transpose(1, 2)[group.real].to(query.dtype)
    return out


def write_and_attend(
    slots: torch.Tensor,
    plan: list[GroupPlan],
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Writes keys and values into the slots and attends; an `Attention` once slots and plan are bound."""
    block_size = values.shape[2]
    write_at(keys, values, (slots // block_size, slots % block_size), new_keys, new_values)
    return run_attention(plan, query, keys, values, scale)
