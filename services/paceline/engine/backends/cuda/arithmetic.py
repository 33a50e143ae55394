"""The arithmetic of `paceline.core.noise` and `paceline.core.processors` as functions of kernels, bit by bit.

The same operations in the same order, so that the device finds the same numbers as the CPU's loops. Kernels that
call these must be compiled with `EXACT`.
"""

from __future__ import annotations

from typing import Final

import triton.language as tl

from paceline.core import noise, processors
from paceline.engine.backends.cuda.launch import kernel

EXACT: Final = {"enable_fp_fusion": False}
"""Options of a launch: products and sums are rounded one by one, as on a CPU, and not fused."""

BLOCK: Final = tl.constexpr(noise.BLOCK)
_COUNTERS: Final = tl.constexpr(noise.BLOCK // 4)
_BLOCK_STREAM: Final = tl.constexpr(noise.BLOCK_STREAM)
_MASS_SCALE: Final = tl.constexpr(processors.MASS_SCALE)
_LEAST_RATIO: Final = tl.constexpr(float(processors.LEAST_RATIO))


@kernel
def exact_log(value):
    """`paceline.core.noise.exact_log`."""
    bits = value.to(tl.uint64, bitcast=True) + 0x95F6200000000
    exponent = ((bits >> 52) | 0x4330000000000000).to(tl.float64, bitcast=True) - 4503599627371519.0
    f = ((bits & 0x000FFFFFFFFFFFFF) + 0x3FE6A09E00000000).to(tl.float64, bitcast=True) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    odd = 2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)
    rest = even + z * (6.666666666666735130e-01 + w * odd)
    half_square = 0.5 * f * f
    return exponent * 6.93147180369123816490e-01 - (
        (half_square - (s * (half_square + rest) + exponent * 1.90821492927058770002e-10)) - f
    )


@kernel
def _exponential(word):
    return -exact_log((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10)


@kernel
def first_arrivals(block, seed, position):
    """Of blocks of ids, int32: when the first arrives, and its place in the block."""
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, (block // 2).to(tl.uint32), low, high, _BLOCK_STREAM)
    odd = block % 2 == 1
    return _exponential(tl.where(odd, w2, w0)) / BLOCK, (tl.where(odd, w3, w1) >> 25).to(tl.int32)


@kernel
def block_noise(block, seed, position, BLOCKS: tl.constexpr):
    """Noise of all ids of some blocks, float64 [BLOCKS, BLOCK]."""
    first, place = first_arrivals(block, seed, position)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    counter = block[:, None] * _COUNTERS + tl.arange(0, _COUNTERS)[None, :]
    w0, w1, w2, w3 = tl.philox(seed, counter.to(tl.uint32), low, high, 0)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCKS, BLOCK))
    waits = tl.where(tl.arange(0, BLOCK)[None, :] == place[:, None], 0.0, _exponential(words))
    return -exact_log(first[:, None] + waits)


@kernel
def share(logit, largest, scale):
    """`paceline.core.processors.share` of a logit beside the largest one, float32."""
    log_ratio = tl.maximum((logit - largest) * scale, _LEAST_RATIO)
    shifted = log_ratio * 1.44269504 + 12582912.0
    k = shifted - 12582912.0
    r = (log_ratio - k * 0.693359375) - k * -2.12194440e-4
    tail = 4.1665795894e-2 + r * (8.3334519073e-3 + r * (1.3981999507e-3 + r * 1.9875691500e-4))
    tail = 5.0000001201e-1 + r * (1.6666665459e-1 + r * tail)
    power = 1.0 + (r + (r * r) * tail)
    bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True)


@kernel
def in_units(mass):
    """A mass in whole units of 1 / MASS_SCALE, int64."""
    units = (mass.to(tl.float64) * _MASS_SCALE + 4503599627370496.0).to(tl.int64, bitcast=True)
    return units - 0x4330000000000000


@kernel
def mass_of_blocks(shares, BLOCKS: tl.constexpr):
    """Masses of blocks of shares [BLOCKS, BLOCK], each added up in float32, upper halves onto lower ones."""
    sums = tl.sum(tl.reshape(shares, (BLOCKS, 2, 64)), 1)
    sums = tl.sum(tl.reshape(sums, (BLOCKS, 2, 32)), 1)
    sums = tl.sum(tl.reshape(sums, (BLOCKS, 2, 16)), 1)
    sums = tl.sum(tl.reshape(sums, (BLOCKS, 2, 8)), 1)
    sums = tl.sum(tl.reshape(sums, (BLOCKS, 2, 4)), 1)
    sums = tl.sum(tl.reshape(sums, (BLOCKS, 2, 2)), 1)
    return in_units(tl.sum(sums, 1))


@kernel
def order_of(value):
    """float32 as whole numbers of the same order, int64."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@kernel
def value_of(order):
    """The inverse of `order_of`."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
