"""Compiled CPU loops around the linear layers, one row at a time in a fixed order; knows arrays, no models.

No loop uses fast-math, and no sum depends on how many rows there are: a row has the same bits in any batch.
Arrays are float32, or uint16 holding bfloat16 bits where a linear layer takes or gives bfloat16.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.engine.backends.cpu.openmp import in_parallel
from paceline.engine.backends.cpu.simd import LANES, encode, to_float32
from paceline.kernel_cache import kernel

_LOG2_E = np.float32(1.4426950408889634)
# Adding and taking away 1.5 * 2**23 rounds to the nearest integer in plain float32 additions.
_ROUNDER = np.float32(12582912.0)
# log(2) in two parts, the first short enough that its product with any exponent is exact (Cody and Waite).
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_EXP_MIN = np.float32(-87.0)
_EXP_MAX = np.float32(88.0)


@kernel
def exp32(value: Any) -> Any:
    """e**value in float32 to 2 ulp, clamped to [-87, 88]; IEEE operations only (Cephes expf's polynomial)."""
    bounded = min(max(value, _EXP_MIN), _EXP_MAX)
    shifted = bounded * _LOG2_E + _ROUNDER
    power = shifted - _ROUNDER
    rest = bounded - power * _LN2_HIGH
    rest = rest - power * _LN2_LOW
    series = np.float32(1.9875691500e-4) * rest + np.float32(1.3981999507e-3)
    series = series * rest + np.float32(8.3334519073e-3)
    series = series * rest + np.float32(4.1665795894e-2)
    series = series * rest + np.float32(1.6666665459e-1)
    series = series * rest + np.float32(5.0000001201e-1)
    series = series * (rest * rest) + rest + np.float32(1.0)
    scale = np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
    return series * scale


@kernel
def inverse_rms(values: Any, start: Any, size: Any, eps: Any) -> Any:
    """1 / sqrt(mean of squares + eps) of `size` values from `start`, summed in 16 interleaved lanes."""
    lanes = np.zeros(LANES, np.float32)
    whole = size - size % LANES
    for first in range(start, start + whole, LANES):
        for lane in range(LANES):
            lanes[lane] += values[first + lane] * values[first + lane]
    for lane in range(size - whole):
        lanes[lane] += values[start + whole + lane] * values[start + whole + lane]
    total = np.float32(0.0)
    for lane in range(LANES):
        total += lanes[lane]
    return np.float32(1.0) / np.sqrt(total / np.float32(size) + eps)


@kernel
def rms_norm_rows(residual: Any, weight: Any, eps: Any, out: Any) -> None:
    """out[rows, hidden] = RMSNorm(residual[rows, hidden]) * weight (Zhang and Sennrich 2019, eq. 4)."""
    hidden = residual.shape[1]
    flat = residual.reshape(-1)
    for row in range(residual.shape[0]):
        scale = inverse_rms(flat, row * hidden, hidden, eps)
        for index in range(hidden):
            out[row, index] = encode(residual[row, index] * scale * weight[index], out)


@kernel
def add_rms_norm_rows(residual: Any, delta: Any, weight: Any, eps: Any, out: Any) -> None:
    """Adds delta[rows, hidden] to the residual in place, then normalises it into out."""
    for row in range(residual.shape[0]):
        for index in range(residual.shape[1]):
            residual[row, index] += to_float32(delta[row, index])
    rms_norm_rows(residual, weight, eps, out)


@kernel
def _silu_mul_share(gate_up: Any, out: Any, first: Any, step: Any) -> None:
    inner = out.shape[1]
    for row in range(first, out.shape[0], step):
        for index in range(inner):
            gate = to_float32(gate_up[row, index])
            up = to_float32(gate_up[row, inner + index])
            out[row, index] = encode(gate / (np.float32(1.0) + exp32(-gate)) * up, out)


@kernel
def silu_mul_rows(gate_up: Any, out: Any) -> None:
    """out[rows, inner] = silu(gate) * up, with gate_up[rows, 2 * inner] = [gate, up]."""
    in_parallel(_silu_mul_share, (gate_up, out))


@kernel
def _rotate(head: Any, cos: Any, sin: Any) -> None:
    half = cos.shape[0]
    for index in range(half):
        low, high = head[index], head[half + index]
        head[index] = low * cos[index] - high * sin[index]
        head[half + index] = high * cos[index] + low * sin[index]


@kernel
def _load_head(source: Any, start: Any, norm: Any, eps: Any, head: Any) -> None:
    """Copies a head out of a row and normalises it when `norm` is not empty (Qwen3's q/k norms)."""
    size = head.shape[0]
    for index in range(size):
        head[index] = to_float32(source[start + index])
    if norm.shape[0] > 0:
        scale = inverse_rms(head, 0, size, eps)
        for index in range(size):
            head[index] = head[index] * scale * norm[index]


@kernel
def project_rows(
    qkv: Any,
    query_norm: Any,
    key_norm: Any,
    eps: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    keys: Any,
    values: Any,
    query: Any,
) -> None:
    """Splits qkv[rows, (H + 2G) * D] into rotated queries and the KV of each row's slot.

    `cos` and `sin` are [rows, D / 2]; `keys` [blocks, G, D, 16] and `values` [blocks, G, 16, D] of one layer
    are written; `query` [rows, H, D] is filled.
    """
    kv_heads, block_size, head_dim = values.shape[1:]
    heads = query.shape[1]
    head = np.empty(head_dim, np.float32)
    for row in range(slots.shape[0]):
        source = qkv[row]
        for index in range(heads):
            _load_head(source, index * head_dim, query_norm, eps, head)
            _rotate(head, cos[row], sin[row])
            for dim in range(head_dim):
                query[row, index, dim] = head[dim]
        block, offset = slots[row] // block_size, slots[row] % block_size
        for index in range(kv_heads):
            _load_head(source, (heads + index) * head_dim, key_norm, eps, head)
            _rotate(head, cos[row], sin[row])
            for dim in range(head_dim):
                keys[block, index, dim, offset] = encode(head[dim], keys)
            start = (heads + kv_heads + index) * head_dim
            for dim in range(head_dim):
                values[block, index, offset, dim] = encode(to_float32(source[start + dim]), values)
