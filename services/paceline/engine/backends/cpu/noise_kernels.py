"""Compiled loops that add noise to a row's survivors: the coupled choice, and rankings with confidences.

Noise is that of `paceline.core.noise`, bit for bit, evaluated in full only where it can change the result.
Rows and cuts: see `row_kernels`. The loops know no request and no session.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.core import noise
from paceline.core.noise import MAX_GUMBEL, WEYL_0, WEYL_1
from paceline.engine.backends.cpu.row_kernels import (
    CHUNK,
    MASS_FLOOR,
    Floats,
    Ints,
    Words,
    exact_exp,
    first_of,
)
from paceline.kernel_cache import inlined, kernel

_BLOCKS = CHUNK // 4
_TWO_52 = 2.0**52
_TWO_52_BITS = np.uint64(0x4330000000000000)
_MASK32 = np.uint64(0xFFFFFFFF)
_SHIFT32 = np.uint64(32)
_ZERO = np.uint64(0)
_LN2 = 0.6931471805599453
_BOUND_MARGIN = 1e-9
_NEGLIGIBLE = 16.0
"""Chunks whose perturbed scores stay this far below the best are left out of a confidence's denominator."""

_round = inlined(noise.philox_round)
_log = inlined(noise.exact_log)


@inlined
def _bumped(key: tuple[Any, Any], rounds: Any) -> tuple[Any, Any]:
    return (key[0] + rounds * WEYL_0) & _MASK32, (key[1] + rounds * WEYL_1) & _MASK32


@inlined
def _philox(block: Any, position: tuple[Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """`core.noise.philox4x32` with its rounds written out: LLVM vectorises the loop around it only then."""
    w0, w1, w2, w3 = _round(block, position[0], position[1], _ZERO, key[0], key[1])
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, *_bumped(key, np.uint64(1)))
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, *_bumped(key, np.uint64(2)))
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, *_bumped(key, np.uint64(3)))
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, *_bumped(key, np.uint64(4)))
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, *_bumped(key, np.uint64(5)))
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, *_bumped(key, np.uint64(6)))
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, *_bumped(key, np.uint64(7)))
    w0, w1, w2, w3 = _round(w0, w1, w2, w3, *_bumped(key, np.uint64(8)))
    return _round(w0, w1, w2, w3, *_bumped(key, np.uint64(9)))


@inlined
def noise_bound(word: Any) -> Any:
    """Returns a cheap upper bound of `word_gumbel`, at most 0.06 above it for words near 2**32.

    gumbel < -log(1 - u), and log2 of a float is at least its bits read as a fixed-point number.
    """
    exact = np.uint64(word | _TWO_52_BITS).view(np.float64) - _TWO_52
    bits = np.float64(4294967295.5 - exact).view(np.uint64)
    log2 = np.uint64((bits >> _SHIFT32) | _TWO_52_BITS).view(np.float64) - _TWO_52
    return (1055.0 - log2 * 2.0**-20) * _LN2 + _BOUND_MARGIN


@kernel
def _fill_bounds(
    scores: Floats,
    first_id: int,
    key: tuple[Any, Any],
    position: tuple[Any, Any],
    words: Words,
    bounds: Floats,
) -> None:
    """Fills the chunk's random words, and bounds that its perturbed scores cannot pass."""
    block0 = np.uint64(first_id // 4)
    for block in range(_BLOCKS):
        word0, word1, word2, word3 = _philox(block0 + np.uint64(block), position, key)
        words[4 * block] = word0
        words[4 * block + 1] = word1
        words[4 * block + 2] = word2
        words[4 * block + 3] = word3
    for offset in range(CHUNK):
        bounds[offset] = scores[offset] + noise_bound(words[offset])


@inlined
def word_gumbel(word: Any) -> Any:
    """Returns the Gumbel variate of a random word; see `core.noise`."""
    return -_log(-_log((np.float64(word) + 0.5) * 2.0**-32))


@kernel
def _gumbel_of(token_id: int, key: tuple[Any, Any], position: tuple[Any, Any]) -> Any:
    block = _philox(np.uint64(token_id // 4), position, key)
    return word_gumbel(block[token_id % 4])


@kernel
def best_perturbed(
    scores: Floats,
    chunk_max: Floats,
    largest: float,
    cut: float,
    last_id: int,
    key: tuple[Any, Any],
    position: tuple[Any, Any],
) -> int:
    """Returns the survivor with the largest score plus noise; noise is evaluated only where it can win."""
    words, bounds = np.empty(CHUNK, np.uint64), np.empty(CHUNK)
    best_id = first_of(scores, chunk_max, largest)
    best = largest + _gumbel_of(best_id, key, position)
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] < cut or chunk_max[chunk] + MAX_GUMBEL < best:
            continue
        base = chunk * CHUNK
        _fill_bounds(scores[base : base + CHUNK], base, key, position, words, bounds)
        hopeful = 0
        for offset in range(CHUNK):
            hopeful += bounds[offset] >= best
        if hopeful == 0:
            continue
        for offset in range(CHUNK):
            score, token_id = scores[base + offset], base + offset
            if bounds[offset] < best or score < cut or (score == cut and token_id > last_id):
                continue
            perturbed = score + word_gumbel(words[offset])
            if perturbed > best or (perturbed == best and token_id < best_id):
                best, best_id = perturbed, token_id
    return best_id


@kernel
def _insert(top_ids: Ints, top_scores: Floats, filled: int, token_id: int, score: float) -> int:
    """Puts an id into the list, best first, behind its equals; returns how many entries hold ids."""
    place = min(filled, len(top_ids) - 1)
    if filled == len(top_ids) and not score > top_scores[place]:
        return filled
    while place > 0 and score > top_scores[place - 1]:
        top_ids[place], top_scores[place] = top_ids[place - 1], top_scores[place - 1]
        place -= 1
    top_ids[place], top_scores[place] = token_id, score
    return min(filled + 1, len(top_ids))


@kernel
def _fill_shares(
    scores: Floats, first_id: int, largest: float, cut: float, last_id: int, words: Words, shares: Floats
) -> None:
    """Adds exp(score + noise - largest) of the chunk's survivors to `shares`; exp(noise) = 1 / -log(u)."""
    for offset in range(CHUNK):
        score = scores[offset]
        share = exact_exp(max(score - largest, MASS_FLOOR)) / -_log((np.float64(words[offset]) + 0.5) * 2.0**-32)
        inside = (score > cut) | ((score == cut) & (first_id + offset <= last_id))
        shares[offset] += share if inside else 0.0


@kernel
def rank_perturbed(
    scores: Floats,
    chunk_max: Floats,
    largest: float,
    cut: float,
    last_id: int,
    key: tuple[Any, Any],
    position: tuple[Any, Any],
    top_ids: Ints,
    top_scores: Floats,
) -> tuple[int, float]:
    """Fills the list of the best perturbed scores; `top_scores` comes as -inf.

    Returns the number of entries and the sum of exp(perturbed - largest) over the survivors, chunks left
    out that cannot matter to it.
    """
    words, bounds, shares = np.empty(CHUNK, np.uint64), np.empty(CHUNK), np.zeros(CHUNK)
    best = largest + _gumbel_of(first_of(scores, chunk_max, largest), key, position)
    filled = 0
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] < cut or chunk_max[chunk] + MAX_GUMBEL < min(best - _NEGLIGIBLE, top_scores[-1]):
            continue
        base = chunk * CHUNK
        _fill_bounds(scores[base : base + CHUNK], base, key, position, words, bounds)
        _fill_shares(scores[base : base + CHUNK], base, largest, cut, last_id, words, shares)
        for offset in range(CHUNK):
            score, token_id = scores[base + offset], base + offset
            if bounds[offset] < top_scores[-1] or score < cut or (score == cut and token_id > last_id):
                continue
            perturbed = score + word_gumbel(words[offset])
            best = max(best, perturbed)
            filled = _insert(top_ids, top_scores, filled, token_id, perturbed)
    return filled, shares.sum()


@kernel
def rank_plain(
    scores: Floats, chunk_max: Floats, largest: float, top_ids: Ints, top_scores: Floats
) -> tuple[int, float]:
    """Fills the list of the best scores; returns its length and the sum of exp(score - largest)."""
    lanes, filled = np.zeros(CHUNK), 0
    for chunk in range(len(chunk_max)):
        base = chunk * CHUNK
        if chunk_max[chunk] - largest > MASS_FLOOR:
            for offset in range(CHUNK):
                lanes[offset] += exact_exp(max(scores[base + offset] - largest, MASS_FLOOR))
        if len(top_ids) == 0 or not chunk_max[chunk] > top_scores[-1]:
            continue
        for token_id in range(base, base + CHUNK):
            if scores[token_id] > top_scores[-1]:
                filled = _insert(top_ids, top_scores, filled, token_id, scores[token_id])
    return filled, lanes.sum()
