"""What a layer computes between its products is what torch computes, one operation after another."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cuda.layer_kernels import add_norm, move, rope_store, silu_mul
from tests.unit.engine.cuda.interpreted import DEVICE

EPS = 1e-5


def randn(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(DEVICE, kind)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", [True, False])
def test_the_residual_grows_and_its_norm_comes_out(kind: torch.dtype, adds: bool) -> None:
    residual, weight = randn(3, 48), randn(48, kind=kind)
    delta = randn(3, 48, kind=kind) if adds else None
    grown = residual + delta.float() if delta is not None else residual.clone()
    out = torch.empty((3, 48), device=DEVICE, dtype=kind)
    add_norm(residual, delta, weight, EPS, out)
    torch.testing.assert_close(residual, grown)
    torch.testing.assert_close(
        out, functional.rms_norm(grown, (48,), weight.float(), EPS).to(kind), rtol=1e-2, atol=1e-5
    )


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "normed"), [(4, 2, 16, False), (3, 1, 24, True)])
def test_heads_are_turned_and_stored_where_their_slots_are(heads: int, kv_heads: int, dim: int, normed: bool) -> None:
    rows, blocks = 5, 3
    qkv, angles = randn(rows, (heads + 2 * kv_heads) * dim), randn(rows, dim // 2)
    norms = randn(heads + kv_heads, dim) if normed else None
    slots = torch.from_numpy(np.random.default_rng(1).permutation(blocks * BLOCK_SIZE)[:rows]).to(DEVICE)
    keys, values = torch.zeros((2, blocks, kv_heads, BLOCK_SIZE, dim), device=DEVICE)
    query = torch.empty((rows, heads, dim), device=DEVICE)
    rope_store(qkv, angles.cos(), angles.sin(), slots, norms, EPS, query, keys, values)
    turned, value = qkv.view(rows, -1, dim).split([heads + kv_heads, kv_heads], dim=1)
    if norms is not None:
        turned = functional.rms_norm(turned, (dim,), None, EPS) * norms
    cos, sin = (part.repeat(1, 2)[:, None] for part in (angles.cos(), angles.sin()))
    low, high = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-high, low), dim=-1) * sin
    torch.testing.assert_close(query, turned[:, :heads])
    for cache, expected in ((keys, turned[:, heads:]), (values, value)):
        stored = cache.transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(stored[slots], expected)
        assert stored.count_nonzero() == expected.count_nonzero()


@pytest.mark.parametrize(("inner", "kind"), [(80, torch.float32), (1500, torch.bfloat16)])
def test_gates_let_through(inner: int, kind: torch.dtype) -> None:
    gate_up = randn(3, 2 * inner, kind=kind)
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(silu_mul(gate_up), (functional.silu(gate) * up).to(kind), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("count", [1, 5, 600])
def test_moves_read_all_sources_before_they_write(count: int) -> None:
    blocks = 64
    keys, values = (randn(2, blocks, 2, BLOCK_SIZE, 24) for _ in range(2))
    rng = np.random.default_rng(count)
    sources, targets = (torch.from_numpy(rng.permutation(blocks * BLOCK_SIZE)[:count]).to(DEVICE) for _ in range(2))
    expected = []
    for cache in (keys, values):
        slots = cache.transpose(2, 3).flatten(1, 2)
        slots[:, targets] = slots[:, sources]
        expected.append(slots)
    move(keys, values, sources, targets)
    for cache, slots in zip((keys, values), expected, strict=True):
        torch.testing.assert_close(cache.transpose(2, 3).flatten(1, 2), slots)


def test_each_is_one_launch(launches: list[str]) -> None:
    residual, cache = randn(2, 32), torch.zeros((2, 1, 1, BLOCK_SIZE, 16), device=DEVICE)
    slots, rope = torch.arange(2, device=DEVICE), randn(2, 2, 8)
    add_norm(residual, None, randn(32), EPS, torch.empty_like(residual))
    rope_store(randn(2, 48), rope[0], rope[1], slots, None, EPS, randn(2, 1, 16), cache[0], cache[1])
    silu_mul(residual)
    move(cache[:, None][0], cache[:, None][1], slots, slots + 2)
    assert launches == ["_add_norm", "_rope_store", "_silu_mul", "_move"]
