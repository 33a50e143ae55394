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
from paceline.engine.simd import LANES, add_weighted_lanes, dot_lanes, encode, fma
from paceline.engine.torch_attention import plan_attention, run_attention


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _scores(
    query: Any, query_at: Any, keys: Any, head: Any, prefix: Any, context: Any, nodes: Any, scores: Any
) -> None:
    """Fills scores[context + len(nodes)]; lanes of the last block past the context are unused."""
    head_dim, block_size = keys.shape[2:]
    flat = keys.reshape(-1)
    block_step, head_step = keys.shape[1] * head_dim * block_size, head_dim * block_size
    for index in range((context + block_size - 1) // block_size):
        start = prefix[index] * block_step + head * head_step
        dot_lanes(query, query_at, flat, start, head_dim, scores, index * block_size)
    for index in range(nodes.shape[0]):
        start = (nodes[index] // block_size) * block_step + head * head_step + nodes[index] % block_size
        total = np.float32(0.0)
        for dim in range(head_dim):
            total = fma(query[query_at + dim], flat[start + dim * block_size], total)
        scores[context + index] = total


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _softmax(scores: Any, count: Any, scale: Any) -> Any:
    """Replaces scores by exp(scale * score - max); returns 1 / their sum."""
    highest = scores[0]
    for index in range(1, count):
        if scores[index] > highest:
            highest = scores[index]
    for index in range(count):
        scores[index] = exp32((scores[index] - highest) * scale)
    total = 0.0
    for index in range(count):
        total += scores[index]
    return np.float32(1.0 / total)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _add_tokens(
    weights: Any, at: Any, values: Any, start: Any, count: Any, head_dim: Any, total: Any
) -> None:
    """Adds weights[at + t] * values[start + t * head_dim:] of `count` tokens t to total[head_dim]."""
    whole = head_dim - head_dim % LANES
    for dim in range(0, whole, LANES):
        add_weighted_lanes(weights, at, values, start + dim, count, head_dim, total, dim)
    for dim in range(whole, head_dim):
        for token in range(count):
            total[dim] = fma(weights[at + token], values[start + token * head_dim + dim], total[dim])


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _weighted_sum(
    weights: Any, values: Any, head: Any, prefix: Any, context: Any, nodes: Any, total: Any
) -> None:
    block_size, head_dim = values.shape[2:]
    flat = values.reshape(-1)
    block_step, head_step = values.shape[1] * block_size * head_dim, block_size * head_dim
    total[:] = np.float32(0.0)
    for index in range((context + block_size - 1) // block_size):
        start = prefix[index] * block_step + head * head_step
        first = index * block_size
        _add_tokens(weights, first, flat, start, min(block_size, context - first), head_dim, total)
    for index in range(nodes.shape[0]):
        start = (
            (nodes[index] // block_size) * block_step
            + head * head_step
            + (nodes[index] % block_size) * head_dim
        )
        _add_tokens(weights, context + index, flat, start, 1, head_dim, total)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def attend_rows(query: Any, keys: Any, values: Any, arrays: Any, scale: Any, out: Any) -> None:
    """Fills out[rows, H * D] from query[rows, H, D] and one layer's cache.

    `keys` are [blocks, G, D, 16], `values` [blocks, G, 16, D], `arrays` the `Batch.attention_arrays`; each
    group of H / G query heads shares a KV head (GQA).
    """
    sequences, context_lens, ancestors, num_ancestors, block_tables = arrays
    rows, heads, head_dim = query.shape
    group = heads // keys.shape[1]
    flat = query.reshape(-1)
    scores = np.empty(block_tables.shape[1] * LANES + ancestors.shape[1] + LANES, np.float32)
    total = np.empty(head_dim, np.float32)
    for row in range(rows):
        context = np.intp(context_lens[row])
        prefix = block_tables[sequences[row]]
        nodes = ancestors[row, : num_ancestors[row]]
        for head in range(heads):
            _scores(
                flat, (row * heads + head) * head_dim, keys, head // group, prefix, context, nodes, scores
            )
            inverse = _softmax(scores, context + nodes.shape[0], scale)
            _weighted_sum(scores, values, head // group, prefix, context, nodes, total)
            for dim in range(head_dim):
                out[row, head * head_dim + dim] = encode(total[dim] * inverse, out)


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _write_rows(keys: Any, values: Any, slots: Any, new_keys: Any, new_values: Any) -> None:
    block_size = values.shape[2]
    for row in range(slots.shape[0]):
        block, offset = slots[row] // block_size, slots[row] % block_size
        keys[block, :, :, offset] = new_keys[row]
        values[block, :, offset, :] = new_values[row]


def write_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
) -> None:
    """Writes new_keys and new_values [rows, G, D] into the slots [rows] of one layer's cache."""
    if keys.device.type == "cpu":
        _write_rows(keys.numpy(), values.numpy(), slots.numpy(), new_keys.numpy(), new_values.numpy())
        return
    block_size = values.shape[2]
    block, offset = slots // block_size, slots % block_size
    keys[block, :, :, offset] = new_keys.to(keys.dtype)
    values[block, :, offset] = new_values.to(values.dtype)


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
        attend_rows(
            query.numpy(), keys.numpy(), values.numpy(), batch.attention_arrays, np.float32(scale), rows
        )
        return out
    return run_attention(plan_attention(batch, query.device), query, keys, values, scale)
