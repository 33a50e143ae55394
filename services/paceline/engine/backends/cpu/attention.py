"""Attention of single rows over paged KV and tree ancestors; knows the cache layout, no models.

Scores, softmax and weighted sum run over a row's tokens in order, one head at a time; rows of one session's tree, which
have their context in common, go through it side by side. So a row's result has the same bits whether its context lies
in blocks or in ancestor slots, and whatever else is in the batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline.engine.backends.cpu.kv import as_array
from paceline.engine.backends.cpu.layer_kernels import exp32
from paceline.engine.backends.cpu.openmp import in_parallel
from paceline.engine.backends.cpu.simd import (
    LANES,
    add_weighted_lanes,
    dot_lanes,
    encode,
    fma,
    side_by_side,
    to_float32,
)
from paceline.engine.batch import Batch
from paceline.kernel_cache import expanded, inlined, kernel

_MOST_ROWS = 4
"""Rows that go through their context side by side: with more, sums and scores would not stay in registers."""


@kernel
def _score_context(query: Any, row: Any, group: Any, keys: Any, prefix: Any, context: Any, scores: Any) -> None:
    """Fills scores[group, H, :context]; lanes of the last block past the context are unused.

    Blocks in the outer loop, heads in the inner: a block is read once, front to back. Several blocks at once, as their
    sums would wait for their own additions one by one.
    """
    heads, head_dim = query.shape[1:]
    kv_heads, _, block_size = keys.shape[1:]
    shared, head_step, width = heads // kv_heads, head_dim * block_size, scores.shape[2]
    step = kv_heads * head_step
    flat_query, flat_keys, flat_scores = query.reshape(-1), keys.reshape(-1), scores.reshape(-1)
    query_step, out_step = heads * head_dim, heads * width
    num_blocks, several = (context + block_size - 1) // block_size, side_by_side(group)
    whole = num_blocks - num_blocks % len(several)
    for index in range(0, whole, len(several)):
        for head in range(heads):
            at, into = head // shared * head_step, head * width + index * block_size
            dot_lanes(
                flat_query, row * query_step + head * head_dim, group, query_step, flat_keys, prefix, index, several,
                step, at, head_dim, flat_scores, into, out_step,
            )  # fmt: skip
    for index in range(whole, num_blocks):
        for head in range(heads):
            at, into = head // shared * head_step, head * width + index * block_size
            dot_lanes(
                flat_query, row * query_step + head * head_dim, group, query_step, flat_keys, prefix, index, (0,),
                step, at, head_dim, flat_scores, into, out_step,
            )  # fmt: skip


@kernel
def _score_nodes(query: Any, keys: Any, context: Any, nodes: Any, scores: Any) -> None:
    """Fills scores[H, context : context + len(nodes)] of one row's query[H, D]."""
    heads, head_dim = query.shape
    kv_heads, _, block_size = keys.shape[1:]
    shared, head_step = heads // kv_heads, head_dim * block_size
    flat_keys = keys.reshape(-1)
    for index in range(nodes.shape[0]):
        start = nodes[index] // block_size * kv_heads * head_step + nodes[index] % block_size
        for head in range(heads):
            keys_at = start + head // shared * head_step
            total = np.float32(0.0)
            for dim in range(head_dim):
                total = fma(query[head, dim], to_float32(flat_keys[keys_at + dim * block_size]), total)
            scores[head, context + index] = total


@inlined
def _softmax(scores: Any, scale: Any, lanes: Any) -> Any:
    """Replaces scores by exp(scale * (score - max)); returns 1 / their sum, summed in 16 interleaved lanes."""
    count = scores.shape[0]
    whole = count - count % LANES
    for lane in range(LANES):
        lanes[lane] = scores[0]
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] = scores[first + lane] if scores[first + lane] > lanes[lane] else lanes[lane]
    highest = lanes[0]
    for lane in range(1, LANES):
        highest = lanes[lane] if lanes[lane] > highest else highest
    for index in range(whole, count):
        highest = scores[index] if scores[index] > highest else highest
    for index in range(count):
        scores[index] = exp32((scores[index] - highest) * scale)
    for lane in range(LANES):
        lanes[lane] = np.float32(0.0)
    for first in range(0, whole, LANES):
        for lane in range(LANES):
            lanes[lane] += scores[first + lane]
    for lane in range(count - whole):
        lanes[lane] += scores[whole + lane]
    total = np.float32(0.0)
    for lane in range(LANES):
        total += lanes[lane]
    return np.float32(1.0) / total


@inlined
def _add_tokens(
    weights: Any,
    weights_at: Any,
    group: Any,
    weights_step: Any,
    values: Any,
    start: Any,
    count: Any,
    head_dim: Any,
    total: Any,
    into: Any,
    step: Any,
) -> None:
    """Adds weights[weights_at + t] * values[start + t * D :] of neighbouring tokens t to total[into : into + D].

    Token by token, and for each row of the group; their weights are `weights_step` apart, their totals `step`.
    """
    several = side_by_side(group)
    in_several, whole = head_dim - head_dim % (len(several) * LANES), head_dim - head_dim % LANES
    for dim in range(0, in_several, len(several) * LANES):
        add_weighted_lanes(
            weights, weights_at, group, weights_step, values, start + dim, several, count, head_dim,
            total, into + dim, step,
        )  # fmt: skip
    for dim in range(in_several, whole, LANES):
        add_weighted_lanes(
            weights, weights_at, group, weights_step, values, start + dim, (0,), count, head_dim,
            total, into + dim, step,
        )  # fmt: skip
    if whole < head_dim:
        for row in group:
            for dim in range(whole, head_dim):
                for token in range(count):
                    value = to_float32(values[start + token * head_dim + dim])
                    to = row * step + into + dim
                    total[to] = fma(weights[weights_at + row * weights_step + token], value, total[to])


@kernel
def _add_context(scores: Any, group: Any, values: Any, prefix: Any, context: Any, total: Any) -> None:
    """Fills total[group, H, D] with the sums of the context's values weighted by scores[group, H, :context]."""
    heads, head_dim = total.shape[1:]
    kv_heads, block_size, _ = values.shape[1:]
    shared, head_step, width = heads // kv_heads, block_size * head_dim, scores.shape[2]
    flat, weights, flat_total = values.reshape(-1), scores.reshape(-1), total.reshape(-1)
    weights_step, total_step = heads * width, heads * head_dim
    for each in group:
        total[each] = np.float32(0.0)
    for index in range((context + block_size - 1) // block_size):
        first = index * block_size
        count, start = min(context - first, block_size), prefix[index] * kv_heads * head_step
        for head in range(heads):
            at, into = start + head // shared * head_step, head * head_dim
            _add_tokens(
                weights,
                head * width + first,
                group,
                weights_step,
                flat,
                at,
                count,
                head_dim,
                flat_total,
                into,
                total_step,
            )


@kernel
def _add_nodes(scores: Any, row: Any, values: Any, context: Any, nodes: Any, total: Any) -> None:
    """Adds the values of one row's nodes to total[row, H, D]."""
    heads, head_dim = total.shape[1:]
    kv_heads, block_size, _ = values.shape[1:]
    shared, head_step, width = heads // kv_heads, block_size * head_dim, scores.shape[2]
    flat, weights, flat_total = values.reshape(-1), scores[row].reshape(-1), total[row].reshape(-1)
    for index in range(nodes.shape[0]):
        start = nodes[index] // block_size * kv_heads * head_step + nodes[index] % block_size * head_dim
        for head in range(heads):
            at, weights_at, into = start + head // shared * head_step, head * width + context + index, head * head_dim
            _add_tokens(weights, weights_at, (0,), 0, flat, at, 1, head_dim, flat_total, into, 0)


@kernel
def _attend_group(
    query: Any, row: Any, size: Any, keys: Any, values: Any, arrays: Any, scale: Any, scores: Any, total: Any, out: Any
) -> None:
    """Attention of the next 1, 2 or 4 rows from one on, all of which attend the same context."""
    sequences, context_lens, ancestors, num_ancestors, block_tables = arrays
    heads, head_dim = query.shape[1:]
    context = np.intp(context_lens[row])
    prefix = block_tables[sequences[row]]
    # The sizes are part of the compiled loops.
    if size == 4:
        _score_context(query, row, (0, 1, 2, 3), keys, prefix, context, scores)
    elif size == 2:
        _score_context(query, row, (0, 1), keys, prefix, context, scores)
    else:
        _score_context(query, row, (0,), keys, prefix, context, scores)
    inverses, lanes = np.empty((size, heads), np.float32), np.empty(LANES, np.float32)
    for each in range(size):
        nodes = ancestors[row + each, : num_ancestors[row + each]]
        _score_nodes(query[row + each], keys, context, nodes, scores[each])
        for head in range(heads):
            inverses[each, head] = _softmax(scores[each, head, : context + nodes.shape[0]], scale, lanes)
    if size == 4:
        _add_context(scores, (0, 1, 2, 3), values, prefix, context, total)
    elif size == 2:
        _add_context(scores, (0, 1), values, prefix, context, total)
    else:
        _add_context(scores, (0,), values, prefix, context, total)
    for each in range(size):
        nodes = ancestors[row + each, : num_ancestors[row + each]]
        _add_nodes(scores, each, values, context, nodes, total)
        for head in range(heads):
            for dim in range(head_dim):
                value = total[each, head, dim] * inverses[each, head]
                out[row + each, head * head_dim + dim] = encode(value, out)


@kernel
def _group_size(row: Any, sequences: Any, context_lens: Any) -> Any:
    """How many rows from this one on attend the same context: 4, 2 or 1."""
    size = 1
    while size < _MOST_ROWS and row + size < sequences.shape[0]:
        if sequences[row + size] != sequences[row] or context_lens[row + size] != context_lens[row]:
            break
        size += 1
    return size - size % 2 if size > 1 else 1


@kernel
def _attend_share(query: Any, keys: Any, values: Any, arrays: Any, scale: Any, out: Any, first: Any, step: Any) -> None:
    sequences, context_lens, ancestors, _, block_tables = arrays
    rows, heads, head_dim = query.shape
    scores = np.empty((_MOST_ROWS, heads, block_tables.shape[1] * LANES + ancestors.shape[1]), np.float32)
    total = np.empty((_MOST_ROWS, heads, head_dim), np.float32)
    # Not a literal 0, for whose type all below would be compiled once more.
    row, number = np.int64(0), 0
    while row < rows:
        size = _group_size(row, sequences, context_lens)
        if number % step == first:
            _attend_group(query, row, size, keys, values, arrays, scale, scores, total, out)
        row, number = row + size, number + 1


@expanded
def attend_rows(query: Any, keys: Any, values: Any, arrays: Any, scale: Any, out: Any) -> None:
    """Fills out[rows, H * D] from query[rows, H, D] and one layer's cache.

    `keys` are [blocks, G, D, 16] and `values` [blocks, G, 16, D], float32 or bfloat16 bits; `arrays` are
    `Batch.attention_arrays`. Each group of H / G query heads shares a KV head (GQA).
    """
    in_parallel(_attend_share, (query, keys, values, arrays, scale, out))


@kernel
def _write_rows(keys: Any, values: Any, slots: Any, new_keys: Any, new_values: Any) -> None:
    block_size = values.shape[2]
    for row in range(slots.shape[0]):
        block, offset = slots[row] // block_size, slots[row] % block_size
        for head in range(keys.shape[1]):
            for dim in range(keys.shape[2]):
                keys[block, head, dim, offset] = encode(new_keys[row, head, dim], keys)
                values[block, head, offset, dim] = encode(new_values[row, head, dim], values)


def paged_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, batch: Batch, scale: float
) -> torch.Tensor:
    """Attention of every row over its context and ancestors, whose KV must be written already.

    Args:
        query: float32 [rows, H, D], contiguous.
        keys: One layer, [blocks, G, D, BLOCK_SIZE].
        values: One layer, [blocks, G, BLOCK_SIZE, D].
        scale: Factor of the scores, usually D ** -0.5.

    Returns:
        float32 [rows, H, D].
    """
    out = torch.empty_like(query)
    rows = out.numpy().reshape(len(out), -1)
    attend_rows(query.numpy(), as_array(keys), as_array(values), batch.attention_arrays, np.float32(scale), rows)
    return out


def write_and_attend(
    batch: Batch,
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Writes keys and values of a batch and attends; an `Attention` once the batch is bound."""
    _write_rows(as_array(keys), as_array(values), batch.slots, new_keys.numpy(), new_values.numpy())
    return paged_attention(query, keys, values, batch, scale)
