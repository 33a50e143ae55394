"""Paged attention: right, and the same bits wherever a row's context lies and in any company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cpu.attention import _write_rows, paged_attention
from paceline.engine.backends.cpu.kv import CpuKVCache, as_array
from paceline.engine.batch import Batch

NUM_BLOCKS = 24


def make_batch(rows, tables):
    """Rows are (sequence, context_len, ancestor slots)."""
    depth = max(len(nodes) for _, _, nodes in rows)
    ancestors = np.full((len(rows), depth), 2**30, dtype=np.int32)
    for index, (_, _, nodes) in enumerate(rows):
        ancestors[index, : len(nodes)] = nodes
    count = np.arange(len(rows))
    return Batch(
        token_ids=count,
        positions=count,
        slots=count,
        sequences=np.array([sequence for sequence, _, _ in rows], dtype=np.int32),
        context_lens=np.array([context for _, context, _ in rows], dtype=np.int32),
        ancestors=ancestors,
        num_ancestors=np.array([len(nodes) for _, _, nodes in rows], dtype=np.int32),
        block_tables=np.array(tables, dtype=np.int32),
        logit_rows=count,
    )


def slots_of(table, context):
    return [table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in range(context)]


def reference(query, cache, slots, scale):
    """One row in float64, [H, D]."""
    blocks, offsets = np.array(slots) // BLOCK_SIZE, np.array(slots) % BLOCK_SIZE
    keys = cache.keys[0].double().numpy()[blocks, :, :, offsets]
    values = cache.values[0].double().numpy()[blocks, :, offsets]
    group = query.shape[0] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("hd,thd->ht", query.double().numpy(), keys) * scale
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)


def random_cache(rng, kv_heads, head_dim, dtype=torch.float32):
    cache = CpuKVCache(1, kv_heads, head_dim, NUM_BLOCKS, dtype=dtype)
    cache.keys.copy_(torch.from_numpy(rng.standard_normal(cache.keys.shape).astype(np.float32)))
    cache.values.copy_(torch.from_numpy(rng.standard_normal(cache.values.shape).astype(np.float32)))
    return cache


@st.composite
def batches(draw):
    """A cache, a batch of rows over three sequences, and its queries."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from([8, 12, 16, 40, 64]))
    tables = rng.permutation(NUM_BLOCKS)[:15].reshape(3, 5).tolist()
    scratch = [
        slot
        for block in range(NUM_BLOCKS)
        if block not in np.ravel(tables)
        for slot in range(block * 16, block * 16 + 16)
    ]
    # Few of them, so that neighbours often have their context in common.
    contexts = draw(st.lists(st.integers(1, 5 * BLOCK_SIZE), min_size=1, max_size=3))
    rows = [
        (
            draw(st.integers(0, 2)),
            draw(st.sampled_from(contexts)),
            rng.choice(scratch, draw(st.integers(0, 6)), replace=False).tolist(),
        )
        for _ in range(draw(st.integers(1, 8)))
    ]
    query = torch.from_numpy(rng.standard_normal((len(rows), kv_heads * group, head_dim)).astype(np.float32))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return random_cache(rng, kv_heads, head_dim, dtype), rows, tables, query


@settings(max_examples=60, deadline=None)
@given(batches())
def test_every_row_attends_its_context_and_its_ancestors_and_nothing_else(drawn):
    cache, rows, tables, query = drawn
    scale = query.shape[-1] ** -0.5
    batch = make_batch(rows, tables)
    compiled = paged_attention(query, cache.keys[0], cache.values[0], batch, scale)
    for index, (sequence, context, nodes) in enumerate(rows):
        expected = reference(query[index], cache, slots_of(tables[sequence], context) + nodes, scale)
        np.testing.assert_allclose(compiled[index].numpy(), expected, atol=3e-6)


@settings(max_examples=60, deadline=None)
@given(batches(), st.data())
def test_a_row_has_the_same_bits_in_blocks_in_ancestor_slots_and_in_any_company(drawn, data):
    cache, rows, tables, query = drawn
    whole = paged_attention(query, cache.keys[0], cache.values[0], make_batch(rows, tables), 0.3)
    index = data.draw(st.integers(0, len(rows) - 1))
    sequence, context, nodes = rows[index]
    alone = make_batch([rows[index]], tables)
    lone_query = query[index : index + 1].contiguous()
    assert torch.equal(paged_attention(lone_query, cache.keys[0], cache.values[0], alone, 0.3)[0], whole[index])
    kept = data.draw(st.integers(0, context))
    moved = slots_of(tables[sequence], context)[kept:] + nodes
    as_tree = make_batch([(sequence, kept, moved)], tables)
    assert torch.equal(paged_attention(lone_query, cache.keys[0], cache.values[0], as_tree, 0.3)[0], whole[index])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "context"), [(64, 70), (16, 64), (72, 5), (9, 33)])
def test_rows_side_by_side_have_the_bits_that_each_has_alone(dtype, head_dim, context):
    rng = np.random.default_rng(head_dim)
    cache = random_cache(rng, 2, head_dim, dtype)
    keys, values = cache.keys[0], cache.values[0]
    tables = [[3, 1, 4, 15, 9], [2, 6, 5, 8, 7]]
    # A tree of seven rows, one of another session between its parts, and two at another place of their text.
    slots = [16 * block + 5 for block in (10, 11, 12, 13, 14, 16)]
    tree = [(0, context, slots[:count]) for count in range(7)]
    rows = [*tree[:3], (1, context, []), *tree[3:], (0, context - 1, []), (0, context - 1, slots[:1])]
    query = torch.from_numpy(rng.standard_normal((len(rows), 4, head_dim)).astype(np.float32))
    together = paged_attention(query, keys, values, make_batch(rows, tables), 0.3)
    for index, row in enumerate(rows):
        alone = paged_attention(query[index : index + 1].contiguous(), keys, values, make_batch([row], tables), 0.3)
        assert torch.equal(together[index], alone[0]), index


@pytest.mark.parametrize("scale", [30.0, 1e-3])
def test_scores_far_apart_or_all_alike_stay_finite_and_exact(scale):
    rng = np.random.default_rng(1)
    cache = random_cache(rng, 2, 16)
    query = torch.from_numpy(rng.standard_normal((1, 2, 16)).astype(np.float32)) * 10
    batch = make_batch([(0, 40, [])], [[3, 2, 9]])
    found = paged_attention(query, cache.keys[0], cache.values[0], batch, scale)
    expected = reference(query[0], cache, slots_of([3, 2, 9], 40), scale)
    np.testing.assert_allclose(found[0].numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_written_kv_is_what_attention_reads(dtype):
    rng = np.random.default_rng(2)
    cache = CpuKVCache(1, 2, 12, NUM_BLOCKS, dtype=dtype)
    keys, values = (torch.from_numpy(rng.standard_normal((5, 2, 12)).astype(np.float32)) for _ in range(2))
    slots = np.array([33, 0, 17, 379, 32])
    _write_rows(as_array(cache.keys[0]), as_array(cache.values[0]), slots, keys.numpy(), values.numpy())
    query = torch.ones((1, 2, 12))
    batch = make_batch([(0, 0, slots.tolist())], [[1]])
    found = paged_attention(query, cache.keys[0], cache.values[0], batch, 0.5)
    keys, values = keys.to(dtype).float(), values.to(dtype).float()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), scale=0.5
    )
    torch.testing.assert_close(found, expected.transpose(0, 1), atol=1e-6, rtol=1e-6)
    assert int((cache.keys[0] != 0).sum()) == keys.numel()
