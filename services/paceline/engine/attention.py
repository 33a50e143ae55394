"""Attention of single rows over paged KV and tree ancestors; knows the cache layout, no models.

On the CPU a compiled loop handles one row and head at a time: scores, softmax and the weighted sum run over
the row's tokens in order. So a row's result has the same bits whether its context lies in blocks or in
ancestor slots, and whatever else is in the batch. On other devices torch's scaled_dot_product_attention does
it (`torch_attention`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import njit

from paceline.engine.batch import Batch
from paceline.engine.kernels import exp32
from paceline.engine.kv import as_array
from paceline.engine.simd import LANES, add_weighted_lanes, dot_lanes, encode, fma, to_float32
from paceline.engine.team import on_team
from paceline.engine.torch_attention import plan_attention, run_attention, write_slots


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _fill_scores(query: Any, keys: Any, prefix: Any, context: Any, nodes: Any, scores: Any) -> None:
    """Fills scores[H, context + len(nodes)]; lanes of the last block past the context are unused.

    Blocks in the outer loop, heads in the inner: a block is read once, front to back. Four blocks at once, as their
    sums would wait for their own additions one by one.
    """
    heads, head_dim = query.shape
    kv_heads, _, block_size = keys.shape[1:]
    group, head_step = heads // kv_heads, head_dim * block_size
    step = kv_heads * head_step
    flat_query, flat_keys, flat_scores = query.reshape(-1), keys.reshape(-1), scores.reshape(-1)
    num_blocks = (context + block_size - 1) // block_size
    in_fours = num_blocks - num_blocks % 4
    for index in range(0, in_fours, 4):
        b0, b1, b2, b3 = prefix[index], prefix[index + 1], prefix[index + 2], prefix[index + 3]
        for head in range(heads):
            at, into = head // group * head_step, head * scores.shape[1] + index * block_size
            keys_at = (b0 * step + at, b1 * step + at, b2 * step + at, b3 * step + at)
            scores_at = (into, into + block_size, into + 2 * block_size, into + 3 * block_size)
            dot_lanes(flat_query, head * head_dim, flat_keys, keys_at, head_dim, flat_scores, scores_at)
    for index in range(in_fours, num_blocks):
        for head in range(heads):
            at, into = prefix[index] * step + head // group * head_step, head * scores.shape[1] + index * block_size
            dot_lanes(flat_query, head * head_dim, flat_keys, (at,), head_dim, flat_scores, (into,))
    for index in range(nodes.shape[0]):
        start = nodes[index] // block_size * kv_heads * head_step + nodes[index] % block_size
        for head in range(heads):
            keys_at = start + head // group * head_step
            total = np.float32(0.0)
            for dim in range(head_dim):
                total = fma(query[head, dim], to_float32(flat_keys[keys_at + dim * block_size]), total)
            scores[head, context + index] = total


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _softmax(scores: Any, scale: Any) -> Any:
    """Replaces scores by exp(scale * (score - max)); returns 1 / their sum."""
    highest = scores[0]
    for index in range(1, scores.shape[0]):
        if scores[index] > highest:
            highest = scores[index]
    for index in range(scores.shape[0]):
        scores[index] = exp32((scores[index] - highest) * scale)
    total = 0.0
    for index in range(scores.shape[0]):
        total += scores[index]
    return np.float32(1.0 / total)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _add_tokens(weights: Any, values: Any, start: Any, total: Any) -> None:
    """Adds weights[t] * values[start + t * head_dim:] of neighbouring tokens t to total[head_dim]."""
    head_dim, count = total.shape[0], weights.shape[0]
    in_fours, whole = head_dim - head_dim % (4 * LANES), head_dim - head_dim % LANES
    for dim in range(0, in_fours, 4 * LANES):
        at, into = start + dim, dim
        values_at = (at, at + LANES, at + 2 * LANES, at + 3 * LANES)
        total_at = (into, into + LANES, into + 2 * LANES, into + 3 * LANES)
        add_weighted_lanes(weights, values, values_at, count, head_dim, total, total_at)
    for dim in range(in_fours, whole, LANES):
        add_weighted_lanes(weights, values, (start + dim,), count, head_dim, total, (dim,))
    for dim in range(whole, head_dim):
        for token in range(count):
            value = to_float32(values[start + token * head_dim + dim])
            total[dim] = fma(weights[token], value, total[dim])


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _add_values(weights: Any, values: Any, prefix: Any, context: Any, nodes: Any, total: Any) -> None:
    """Fills total[H, D] with the sums of values weighted by weights[H, context + len(nodes)], token by token."""
    heads, head_dim = total.shape
    kv_heads, block_size, _ = values.shape[1:]
    group, head_step = heads // kv_heads, block_size * head_dim
    flat = values.reshape(-1)
    total[:] = np.float32(0.0)
    for index in range((context + block_size - 1) // block_size):
        first, last = index * block_size, min(context, (index + 1) * block_size)
        start = prefix[index] * kv_heads * head_step
        for head in range(heads):
            _add_tokens(weights[head, first:last], flat, start + head // group * head_step, total[head])
    for index in range(context, context + nodes.shape[0]):
        slot = nodes[index - context]
        start = slot // block_size * kv_heads * head_step + slot % block_size * head_dim
        for head in range(heads):
            _add_tokens(weights[head, index : index + 1], flat, start + head // group * head_step, total[head])


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _attend_share(query: Any, keys: Any, values: Any, arrays: Any, scale: Any, out: Any, first: Any, step: Any) -> None:
    sequences, context_lens, ancestors, num_ancestors, block_tables = arrays
    rows, heads, head_dim = query.shape
    scores = np.empty((heads, block_tables.shape[1] * LANES + ancestors.shape[1]), np.float32)
    total = np.empty((heads, head_dim), np.float32)
    inverses = np.empty(heads, np.float32)
    for row in range(first, rows, step):
        context = np.intp(context_lens[row])
        prefix = block_tables[sequences[row]]
        nodes = ancestors[row, : num_ancestors[row]]
        _fill_scores(query[row], keys, prefix, context, nodes, scores)
        count = context + nodes.shape[0]
        for head in range(heads):
            inverses[head] = _softmax(scores[head, :count], scale)
        _add_values(scores, values, prefix, context, nodes, total)
        for head in range(heads):
            for dim in range(head_dim):
                out[row, head * head_dim + dim] = encode(total[head, dim] * inverses[head], out)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def attend_rows(query: Any, keys: Any, values: Any, arrays: Any, scale: Any, out: Any) -> None:
    """Fills out[rows, H * D] from query[rows, H, D] and one layer's cache.

    `keys` are [blocks, G, D, 16] and `values` [blocks, G, 16, D], float32 or bfloat16 bits; `arrays` are
    `Batch.attention_arrays`. Each group of H / G query heads shares a KV head (GQA).
    """
    on_team(_attend_share, (query, keys, values, arrays, scale, out))


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _write_rows(keys: Any, values: Any, slots: Any, new_keys: Any, new_values: Any) -> None:
    block_size = values.shape[2]
    for row in range(slots.shape[0]):
        block, offset = slots[row] // block_size, slots[row] % block_size
        for head in range(keys.shape[1]):
            for dim in range(keys.shape[2]):
                keys[block, head, dim, offset] = encode(new_keys[row, head, dim], keys)
                values[block, head, offset, dim] = encode(new_values[row, head, dim], values)


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """Writes new_keys and new_values [rows, G, D] into the slots [rows] of one layer's cache."""
    if keys.device.type == "cpu":
        _write_rows(as_array(keys), as_array(values), slots.numpy(), new_keys.numpy(), new_values.numpy())
    else:
        write_slots(keys, values, slots, new_keys, new_values)


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, scale: float
) -> torch.Tensor:
    """Attention of every row over its context and ancestors, whose KV must be written already.

    Args:
        query: float32 [rows, H, D], contiguous.
        keys: One layer, [blocks, G, D, BLOCK_SIZE].
        values: One layer, [blocks, G, BLOCK_SIZE, D].
        batch: The rows.
        scale: Factor of the scores, usually D ** -0.5.

    Returns:
        float32 [rows, H, D].
    """
    if query.device.type == "cpu":
        out = torch.empty_like(query)
        rows = out.numpy().reshape(len(out), -1)
        attend_rows(query.numpy(), as_array(keys), as_array(values), batch.attention_arrays, np.float32(scale), rows)
        return out
    return run_attention(plan_attention(batch, query.device), query, keys, values, scale)
