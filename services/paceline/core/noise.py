"""Noise as a pure function of the session's seed: Gumbel variates of the coupled rule, uniforms of the other rules.

A Gumbel variate is -log(t) with t exponential, the time at which its id arrives in a race. Ids come in blocks of
`BLOCK`. The first arrival of a block is exponential, too, BLOCK times as early, and each of the block's ids is equally
likely to be the one; the others wait on, and what they wait beyond it is exponential once more:

    first = -log(u_block) / BLOCK            t_id = first + (0 if id is the block's first, else -log(u_id))

These are independent exponentials, exactly, and whoever wants the best of many ids looks into few blocks: no variate of
a block exceeds -log(first). Each u is (word + 0.5) * 2**-32, which float64 holds exactly. Words are those of
Philox4x32-10 under the key (seed low, seed high), where `position` is the absolute one that the token will take:

    u_id         word id % 4 of the counter (id // 4, position low, position high, 0)
    u_block      word 0 (even blocks) or 2 (odd) of the counter (block // 2, position low, position high, BLOCK_STREAM)
    first id     the seven upper bits of the word behind that one

Everything is built from integer operations and IEEE 754 additions, multiplications and divisions of float64,
in a fixed order, so that every machine gets the same bits. `philox_round`, `exact_log` and `exact_exp` take
arrays as well as scalars and call no Python function: `paceline.engine` compiles these very sources for its
loops, and `tests/support/reference_sampling.py` calls them, which is why the two agree to the last bit. This module
must not know what the noise is for, nor hold any state.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PHILOX_ROUNDS = 10
BLOCK = 128
"""Ids of a block; its place in one is seven bits."""

# What uniforms are for, in the counter's last word; the coupled rule's noise of ids has 0 there. So no two share a
# number.
DRAFT_STREAM, VERDICT_STREAM, BLOCK_STREAM = 1, 2, 3

_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
WEYL_0 = np.uint64(0x9E3779B9)
WEYL_1 = np.uint64(0xBB67AE85)

_SHIFT52 = np.uint64(52)
_MANTISSA = np.uint64(0x000FFFFFFFFFFFFF)
_SQRT_HALF_BITS = np.uint64(0x3FE6A09E00000000)
_ONE_MINUS_SQRT_HALF_BITS = np.uint64(0x3FF0000000000000 - 0x3FE6A09E00000000)
_TWO_52_BITS = np.uint64(0x4330000000000000)
_TWO_52 = 4503599627370496.0
_EXPONENT_OFFSET = _TWO_52 + 1023.0
_ROUND_TO_EXPONENT = 1.5 * _TWO_52 + 1023.0
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
_LOG2_E = 1.44269504088896338700e00


def philox_round(c0: Any, c1: Any, c2: Any, c3: Any, key0: Any, key1: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the counter after one round; all values are uint64 that hold 32-bit words."""
    product0 = _MULTIPLIER_0 * c0
    product1 = _MULTIPLIER_1 * c2
    return (
        (product1 >> _SHIFT32) ^ c1 ^ key0,
        product1 & _MASK32,
        (product0 >> _SHIFT32) ^ c3 ^ key1,
        product0 & _MASK32,
    )


def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, key0: Any, key1: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the four 32-bit words of Philox4x32-10 for one counter and key (Salmon et al., SC 2011).

    All arguments and results are uint64 (arrays that broadcast, or scalars) that hold 32-bit words.
    """
    for _ in range(PHILOX_ROUNDS):
        c0, c1, c2, c3 = philox_round(c0, c1, c2, c3, key0, key1)
        key0 = (key0 + WEYL_0) & _MASK32
        key1 = (key1 + WEYL_1) & _MASK32
    return c0, c1, c2, c3


def exact_log(value: Any) -> Any:
    """Returns the natural logarithm of positive normal float64 values, below 1 ulp off, near 1 as well.

    FreeBSD's e_log.c without its branches: value = 2**exponent * (1 + f) with 1 + f in [sqrt(1/2),
    sqrt(2)), so that for values near 1 the exponent is 0 and f = value - 1 is exact.
    """
    bits = np.float64(value).view(np.uint64) + _ONE_MINUS_SQRT_HALF_BITS
    exponent = np.uint64((bits >> _SHIFT52) | _TWO_52_BITS).view(np.float64) - _EXPONENT_OFFSET
    f = np.uint64((bits & _MANTISSA) + _SQRT_HALF_BITS).view(np.float64) - 1.0
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01))
    odd = 2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01)
    rest = even + z * (6.666666666666735130e-01 + w * odd)
    half_square = 0.5 * f * f
    return exponent * _LN2_HIGH - ((half_square - (s * (half_square + rest) + exponent * _LN2_LOW)) - f)


def exact_exp(value: Any) -> Any:
    """Returns the exponential of float64 values in [-700, 700], about 1 ulp off.

    value = k * log(2) + r with |r| <= log(2) / 2, then the Taylor polynomial of degree 13.
    """
    shifted = value * _LOG2_E + _ROUND_TO_EXPONENT
    k = shifted - _ROUND_TO_EXPONENT
    r = (value - k * _LN2_HIGH) - k * _LN2_LOW
    tail = 1.0 / 39916800.0 + r * (1.0 / 479001600.0 + r * (1.0 / 6227020800.0))
    tail = 1.0 / 40320.0 + r * (1.0 / 362880.0 + r * (1.0 / 3628800.0 + r * tail))
    tail = 1.0 / 120.0 + r * (1.0 / 720.0 + r * (1.0 / 5040.0 + r * tail))
    power = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * tail))))
    return power * np.uint64(np.float64(shifted).view(np.uint64) << _SHIFT52).view(np.float64)


def split_uint64(value: int) -> tuple[np.uint64, np.uint64]:
    """Returns the low and the high 32-bit word of a seed or position."""
    return np.uint64(value & 0xFFFFFFFF), np.uint64(value >> 32)


def uniforms(seed: int, stream: int, position: int, base_len: int, parent_id: int = 0) -> tuple[float, float]:
    """Returns two numbers in [0, 1), each a multiple of 2**-53.

    Key = seed (low, high); counter = (position, base_len, parent_id, stream). What is drawn anew after more tokens were
    committed, or below another node, never meets a number that was used before.

    Args:
        seed: The session's, a uint64.
        stream: `DRAFT_STREAM` or `VERDICT_STREAM`.
        position: Absolute position of the token in question, a uint32 as on the wire.
        base_len: Tokens that were committed when it was drawn or judged, a uint32.
        parent_id: The node below which it was drawn, a uint32.
    """
    c0, c1, c2, c3 = (np.uint64(word) for word in (position, base_len, parent_id, stream))
    words = [int(word) for word in philox4x32(c0, c1, c2, c3, *split_uint64(seed))]
    first, second = ((high >> 5) * 2.0**26 + (low >> 6) for high, low in (words[:2], words[2:]))
    return first * 2.0**-53, second * 2.0**-53
