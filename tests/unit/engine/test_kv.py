"""Moving KV between slots."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cpu.kv import CpuKVCache
from paceline.engine.kv import KVCache


def random_cache(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    cache = CpuKVCache(2, 3, 5, 4, dtype=dtype)
    cache.keys.normal_(generator=generator)
    cache.values.normal_(generator=generator)
    return cache


def by_slot(cache):
    """Keys and values as [slots, layers, heads, dim] copies."""
    keys = cache.keys.permute(1, 4, 0, 2, 3).reshape(4 * BLOCK_SIZE, 2, 3, 5)
    values = cache.values.permute(1, 3, 0, 2, 4).reshape(4 * BLOCK_SIZE, 2, 3, 5)
    return keys.clone(), values.clone()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.lists(st.tuples(st.integers(0, 63), st.integers(0, 63)), max_size=12, unique_by=lambda pair: pair[1]),
)
def test_copies_read_every_source_before_writing_any_target(dtype, pairs):
    cache = random_cache(dtype)
    before = by_slot(cache)
    sources, targets = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    cache.copy_slots(sources, targets)
    in_torch = random_cache(dtype)
    KVCache._copy_kv(in_torch, sources, targets)
    assert torch.equal(in_torch.keys, cache.keys)
    assert torch.equal(in_torch.values, cache.values)
    for old, new in zip(before, by_slot(cache), strict=True):
        expected = old.clone()
        expected[targets] = old[sources]
        assert torch.equal(new, expected)


def test_the_cache_says_how_much_memory_it_takes():
    elements = 2 * (2 * 4 * 3 * 5 * BLOCK_SIZE)
    assert CpuKVCache(2, 3, 5, 4).nbytes == elements * 4
    assert CpuKVCache(2, 3, 5, 4, dtype=torch.bfloat16).nbytes == elements * 2


def test_views_of_layers_share_the_memory_of_the_cache():
    cache = random_cache()
    keys, values = cache.layers[1]
    keys[2, 0, 4, 7] = 123.0
    values[3, 2, 15, 1] = 456.0
    assert cache.keys[1, 2, 0, 4, 7] == 123.0
    assert cache.values[1, 3, 2, 15, 1] == 456.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_pages_take_memory_when_they_are_first_written():
    before = resident_bytes()
    cache = CpuKVCache(16, 8, 64, 2048, dtype=torch.bfloat16, state_width=64)
    assert cache.nbytes > 1e9
    assert resident_bytes() - before < 1e8
    assert not cache.keys[3, 2000].any(), "unused lanes never hold NaN"
    cache.values.fill_(1.0)
    assert resident_bytes() - before > 5e8
    cache.copy_slots(np.zeros(1, np.int64), np.full(1, 2047 * BLOCK_SIZE))
    assert resident_bytes() - before < 7e8
