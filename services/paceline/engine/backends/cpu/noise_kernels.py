"""Compiled loops that add noise to a row's survivors and find the best, and those that find the best without noise.

Noise is that of `paceline.core.noise`, bit for bit. Its blocks are the chunks of rows, so no perturbed score of a chunk
exceeds the chunk's largest score plus its block's largest noise; most chunks are passed over by this bound. Rows and
cuts: see `row_kernels`. The loops know no request and no session.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.core import noise
from paceline.core.noise import BLOCK_STREAM, WEYL_0, WEYL_1
from paceline.engine.backends.cpu.row_kernels import CHUNK, Floats, Ints, Logits, Words, level_of
from paceline.kernel_cache import inlined, kernel

_MASK32 = np.uint64(0xFFFFFFFF)
_ID_STREAM, _BLOCK_STREAM, _PLACE_SHIFT = np.uint64(0), np.uint64(BLOCK_STREAM), np.uint64(25)
# Logarithms are less than this off where noise is largest, so a bound without it might be passed.
_BOUND_MARGIN = 1e-12

_round = inlined(noise.philox_round)
_log = inlined(noise.exact_log)


@inlined
def _bumped(key: tuple[Any, Any], rounds: Any) -> tuple[Any, Any]:
    return (key[0] + rounds * WEYL_0) & _MASK32, (key[1] + rounds * WEYL_1) & _MASK32


@inlined
def _philox(counter: Any, position: tuple[Any, Any], stream: Any, key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """`core.noise.philox4x32` with its rounds written out: LLVM vectorises the loop around it only then."""
    w0, w1, w2, w3 = _round(counter, position[0], position[1], stream, key[0], key[1])
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
def exponential(word: Any) -> Any:
    """Returns the exponential variate of a random word; see `core.noise`."""
    return -_log((np.float64(word) + 0.5) * 2.0**-32)


@kernel
def _fill_blocks(position: tuple[Any, Any], key: tuple[Any, Any], firsts: Floats, places: Ints) -> None:
    """Fills in the first arrival of each block, and its place in it; a pair of blocks a time."""
    for pair in range(len(firsts) // 2):
        word0, word1, word2, word3 = _philox(np.uint64(pair), position, _BLOCK_STREAM, key)
        firsts[2 * pair], places[2 * pair] = exponential(word0) / CHUNK, np.int64(word1 >> _PLACE_SHIFT)
        firsts[2 * pair + 1], places[2 * pair + 1] = exponential(word2) / CHUNK, np.int64(word3 >> _PLACE_SHIFT)


@kernel
def _fill_bounds(chunk_max: Logits, cut: Any, inverse_temperature: float, firsts: Floats, bounds: Floats) -> None:
    """Fills in what no perturbed score of a chunk exceeds; -inf where nothing survives."""
    for chunk in range(len(chunk_max)):
        bound = np.float64(chunk_max[chunk]) * inverse_temperature + (_BOUND_MARGIN - _log(firsts[chunk]))
        bounds[chunk] = bound if chunk_max[chunk] >= cut else -np.inf


@kernel
def _fill_arrivals(
    chunk: int, position: tuple[Any, Any], key: tuple[Any, Any], first: float, place: int, words: Words, noises: Floats
) -> None:
    """Fills in the noise of a chunk's ids."""
    for quarter in range(CHUNK // 4):
        word0, word1, word2, word3 = _philox(np.uint64(chunk * (CHUNK // 4) + quarter), position, _ID_STREAM, key)
        words[4 * quarter] = word0
        words[4 * quarter + 1] = word1
        words[4 * quarter + 2] = word2
        words[4 * quarter + 3] = word3
    for offset in range(CHUNK):
        noises[offset] = -_log(first + (0.0 if offset == place else exponential(words[offset])))


@kernel
def _insert(top_ids: Ints, top_scores: Floats, token_id: int, score: float) -> None:
    """Puts an id into the list: best first, lowest id among equals."""
    place = len(top_ids) - 1
    if not (score > top_scores[place] or (score == top_scores[place] and token_id < top_ids[place])):
        return
    while place > 0 and (
        score > top_scores[place - 1] or (score == top_scores[place - 1] and token_id < top_ids[place - 1])
    ):
        top_ids[place], top_scores[place] = top_ids[place - 1], top_scores[place - 1]
        place -= 1
    top_ids[place], top_scores[place] = token_id, score


@kernel
def best_perturbed(
    row: Logits,
    chunk_max: Logits,
    cut: Any,
    last_id: int,
    inverse_temperature: float,
    key: tuple[Any, Any],
    position: tuple[Any, Any],
    blocks: tuple[Floats, Ints, Floats],
    top_ids: Ints,
    top_scores: Floats,
) -> None:
    """Fills the list of the survivors with the best scores plus noise; it comes with NOTHING and -inf."""
    firsts, places, bounds = blocks
    words, noises = np.empty(CHUNK, np.uint64), np.empty(CHUNK)
    _fill_blocks(position, key, firsts, places)
    _fill_bounds(chunk_max, cut, inverse_temperature, firsts, bounds)
    # The most promising chunks first: what they give rules out nearly all others.
    level = level_of(bounds, len(top_ids)) if len(top_ids) > 1 else bounds.max()
    for again in range(2):
        for chunk in range(len(bounds)):
            if bounds[chunk] == -np.inf or bounds[chunk] < (top_scores[-1] if again else level):
                continue
            bounds[chunk] = -np.inf
            _fill_arrivals(chunk, position, key, firsts[chunk], places[chunk], words, noises)
            base = chunk * CHUNK
            for offset in range(min(CHUNK, len(row) - base)):
                logit, token_id = row[base + offset], base + offset
                perturbed = np.float64(logit) * inverse_temperature + noises[offset]
                if perturbed >= top_scores[-1] and (logit > cut or (logit == cut and token_id <= last_id)):
                    _insert(top_ids, top_scores, token_id, perturbed)


@kernel
def best_plain(row: Logits, chunk_max: Logits, top_ids: Ints, top_scores: Floats) -> None:
    """Fills the list of the ids with the largest logits; it comes with NOTHING and -inf."""
    level = level_of(chunk_max, len(top_ids)) if len(top_ids) > 1 else chunk_max.max()
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] < level or not chunk_max[chunk] > top_scores[-1]:
            continue
        for token_id in range(chunk * CHUNK, min(chunk * CHUNK + CHUNK, len(row))):
            if row[token_id] > top_scores[-1]:
                _insert(top_ids, top_scores, token_id, np.float64(row[token_id]))
