"""Kernels between the products, each one launch: in a layer, between levels of guesses, and moves between slots."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
import triton.language as tl

from paceline.core import pages
from paceline.engine.backends.cuda.launch import kernel, launch, power_of_two, require_contiguous

_BLOCK_SIZE: Final = tl.constexpr(pages.BLOCK_SIZE)
_TILE: Final = 1024
# Rows of a program that goes down with them.
_ROWS: Final = 64
# Slots that are moved at once, in few sizes, since each is compiled; and what a program holds of them.
MOVES: Final = (256, 1024, 4096, 16384)
_HELD: Final = 16384


def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """Adds to the residual stream, and writes its RMS norm.

    Args:
        residual: float32 [rows, hidden], changed.
        delta: [rows, hidden]; None: nothing is added.
        weight: [hidden].
        out: [rows, hidden], in any kind.
    """
    require_contiguous(residual=residual, out=out)
    rows, hidden = residual.shape
    if delta is not None:
        require_contiguous(delta=delta)
    launch(
        _add_norm, (rows,), residual, residual if delta is None else delta, weight, out, eps,
        HIDDEN=hidden, PADDED=power_of_two(hidden), ADDS=delta is not None, num_warps=8,
    )  # fmt: skip


@kernel
def _add_norm(residual, delta, weight, out, eps, HIDDEN: tl.constexpr, PADDED: tl.constexpr, ADDS: tl.constexpr):
    at = tl.arange(0, PADDED)
    inside = at < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + at
    value = tl.load(residual + place, mask=inside, other=0.0)
    if ADDS:
        value += tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + place, value, mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, 0) / HIDDEN + eps)
    normed = value * scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


def rope_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    norms: torch.Tensor | None,
    eps: float,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Turns queries and keys by their positions, and stores keys and values where the rows' slots are.

    Args:
        qkv: [rows, (H + 2 G) D].
        cos: float32 [rows, D / 2], and so sin: of each pair's angle.
        slots: int32 or int64 [rows].
        norms: [H + G, D], weights of the RMS norms of heads; None: heads are not normed.
        query: [rows, H, D], written.
        keys: Of one layer, [blocks, G, BLOCK_SIZE, D], written; and values.
    """
    require_contiguous(qkv=qkv, cos=cos, sin=sin, query=query, keys=keys, values=values)
    (rows, heads, dim), kv_heads = query.shape, keys.shape[1]
    launch(
        _rope_store, (rows, heads + 2 * kv_heads), qkv, cos, sin, slots, cos if norms is None else norms, eps,
        query, keys, values, HEADS=heads, KV=kv_heads, D=dim, HALF=dim // 2, PADDED=power_of_two(dim // 2),
        NORMED=norms is not None, num_warps=1,
    )  # fmt: skip


@kernel
def _rope_store(
    qkv, cos, sin, slots, norms, eps, query, keys, values,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr,
    NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one row; heads are those of queries, then of keys, then of values."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, PADDED)
    inside = at < HALF
    source = qkv + (row * (HEADS + 2 * KV) + head) * D + at
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if head < HEADS + KV:
        if NORMED:
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / D + eps)
            low *= scale * tl.load(norms + head * D + at, mask=inside, other=0.0).to(tl.float32)
            high *= scale * tl.load(norms + head * D + HALF + at, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + row * HALF + at, mask=inside, other=0.0)
        s = tl.load(sin + row * HALF + at, mask=inside, other=0.0)
        low, high = low * c - high * s, high * c + low * s
    if head < HEADS:
        target = query + (row * HEADS + head) * D + at
        tl.store(target, low.to(query.dtype.element_ty), mask=inside)
        tl.store(target + HALF, high.to(query.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        kv_head = (head - HEADS) % KV
        place = ((slot // _BLOCK_SIZE * KV + kv_head) * _BLOCK_SIZE + slot % _BLOCK_SIZE) * D + at
        cache = keys if head < HEADS + KV else values
        tl.store(cache + place, low.to(keys.dtype.element_ty), mask=inside)
        tl.store(cache + place + HALF, high.to(keys.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The gated product: of [rows, 2 inner], gates before what they let through, to [rows, inner] of the same kind."""
    require_contiguous(gate_up=gate_up)
    rows, inner = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, inner))
    tile = min(_TILE, power_of_two(inner))
    launch(_silu_mul, (rows, -(-inner // tile)), gate_up, out, INNER=inner, TILE=tile, num_warps=4)
    return out


@kernel
def _silu_mul(gate_up, out, INNER: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < INNER
    gate = tl.load(gate_up + row * 2 * INNER + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * INNER + INNER + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + at, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def move(keys: torch.Tensor, values: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies KV from slot to slot in all layers; all sources are read before any target is written.

    Args:
        keys: [layers, blocks, G, BLOCK_SIZE, D]; and values.
        sources: int64 [n], at most 16,384.
        targets: int64 [n], distinct.
    """
    require_contiguous(keys=keys, values=values)
    layers, blocks, kv_heads, _, dim = keys.shape
    padded = next(size for size in MOVES if size >= len(sources))
    tile = min(power_of_two(dim), _HELD // padded)
    launch(
        _move, (layers * kv_heads, -(-dim // tile), 2), keys, values, sources, targets, len(sources), blocks,
        KV=kv_heads, D=dim, SLOTS=padded, TILE=tile, num_warps=4,
    )  # fmt: skip


@partial(kernel, changing=("count",))
def _move(
    keys, values, sources, targets, count, blocks,
    KV: tl.constexpr, D: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Some dimensions of one KV head of one layer: none but this program reads or writes them."""
    layer, kv_head = tl.program_id(0) // KV, tl.program_id(0) % KV
    each, dims = tl.arange(0, SLOTS), tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = (each < count)[:, None] & (dims < D)[None, :]
    first = layer.to(tl.int64) * blocks * KV * _BLOCK_SIZE
    source = tl.load(sources + each, mask=each < count, other=0)
    target = tl.load(targets + each, mask=each < count, other=0)
    read = first + (source // _BLOCK_SIZE * KV + kv_head) * _BLOCK_SIZE + source % _BLOCK_SIZE
    written = first + (target // _BLOCK_SIZE * KV + kv_head) * _BLOCK_SIZE + target % _BLOCK_SIZE
    cache = keys if tl.program_id(2) == 0 else values
    held = tl.load(cache + read[:, None] * D + dims[None, :], mask=real)
    tl.debug_barrier()
    tl.store(cache + written[:, None] * D + dims[None, :], held, mask=real)


def go_down(
    found: torch.Tensor,
    level: torch.Tensor,
    below: torch.Tensor,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Makes of each row the one below it, with its best guess.

    Args:
        found: int32 [levels, rows, 2, n], what `choose.rank` found at each level; the first is that of the step above.
        level: int64 [1], how many levels the rows have gone down; grows by 1.
        below: int64 [levels, rows, 3], slots and masks of the rows at each level, and how many nodes each lane has.
        rows: Token ids and positions, int32 [rows]; positions to guess at, slots and masks, int64 [rows]; nodes of
            lanes, int32 [rows]; changed.
    """
    num, _, count = found.shape[1:]
    launch(_go_down, (-(-num // _ROWS),), found, level, below, *rows, num, ROWS=_ROWS, COUNT=count, num_warps=2)
    level.add_(1)


@partial(kernel, changing=("num",))
def _go_down(
    found, level, below, token_ids, positions, asked_positions, slots, node_bits, lane_nodes, num,
    ROWS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, place = row < num, tl.load(level) * num + row
    token = tl.load(found + place * 2 * COUNT, mask=there, other=0)
    # Where there is none the row goes on with any.
    tl.store(token_ids + row, tl.maximum(token, 0), mask=there)
    tl.store(positions + row, tl.load(positions + row, mask=there) + 1, mask=there)
    tl.store(asked_positions + row, tl.load(asked_positions + row, mask=there) + 1, mask=there)
    tl.store(slots + row, tl.load(below + 3 * place, mask=there), mask=there)
    tl.store(node_bits + row, tl.load(below + 3 * place + 1, mask=there), mask=there)
    tl.store(lane_nodes + row, tl.load(below + 3 * place + 2, mask=there).to(tl.int32), mask=there)
