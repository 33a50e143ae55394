"""Compiled loops from one row of logits to the survivors of its filters, bit for bit as `paceline.core`.

A row lives in a `scores` buffer of float64 padded with -inf to whole chunks; `chunk_max` holds each chunk's
largest score, so that chunks that cannot matter are skipped. Survivors are always a head of the order
(largest score first, lowest id among equals), hence given by two numbers: scores above `cut`, and those
equal to `cut` with ids up to `last_id`. The loops release the GIL and know no request, session or noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core import noise
from paceline.kernel_cache import inlined, kernel

CHUNK = 128
"""Ids a chunk holds: 32 Philox blocks of 4 ids."""
MASS_FLOOR = -700.0
_LANES = 8
_BUCKETS = 512
_BUCKETS_PER_NAT = 16.0
_MASS_SCALE = 2.0**42
_LOWEST = -np.finfo(np.float64).max
_TWO_52 = 2.0**52
_TWO_52_BITS = np.uint64(0x4330000000000000)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]

exact_exp = inlined(noise.exact_exp)


@kernel
def _find_maxima(scores: Floats, chunk_max: Floats) -> float:
    """Fills `chunk_max` and returns the largest score, or NaN if any score is NaN."""
    lanes = np.empty(_LANES)
    largest, spoiled = -np.inf, 0
    for chunk in range(len(chunk_max)):
        base = chunk * CHUNK
        for lane in range(_LANES):
            lanes[lane] = -np.inf
        for start in range(base, base + CHUNK, _LANES):
            for lane in range(_LANES):
                score = scores[start + lane]
                spoiled |= score != score
                lanes[lane] = score if score > lanes[lane] else lanes[lane]
        top = lanes.max()
        chunk_max[chunk] = top
        largest = max(largest, top)
    return np.nan if spoiled else largest


@kernel
def load_row(
    logits: Logits,
    bias_ids: Ints,
    biases: Floats,
    masked_ids: Ints,
    allowed: Bits,
    seen_ids: Ints,
    seen_counts: Ints,
    penalties: tuple[float, float, float],
    inverse_temperature: float,
    scores: Floats,
    chunk_max: Floats,
) -> float:
    """Fills `scores` and `chunk_max` from one row; returns the largest score (NaN if any is).

    `allowed` holds one bit an id, as `paceline.core.grammar.Bits`; empty: all are. `penalties` = (repetition,
    frequency, presence); `seen_counts` holds output counts, 0 for ids of the prompt alone.
    """
    for token_id in range(len(logits)):
        scores[token_id] = np.float64(logits[token_id])
    for entry in range(len(bias_ids)):
        scores[bias_ids[entry]] += biases[entry]
    for entry in range(len(masked_ids)):
        scores[masked_ids[entry]] = -np.inf
    for place in range(len(allowed)):
        byte = allowed[place]
        if byte != 255:
            for token_id in range(8 * place, min(8 * place + 8, len(logits))):
                if not (byte >> (token_id - 8 * place)) & 1:
                    scores[token_id] = -np.inf
    repetition, frequency, presence = penalties
    for entry in range(len(seen_ids)):
        token_id, count = seen_ids[entry], seen_counts[entry]
        score = scores[token_id]
        score = score / repetition if score > 0.0 else score * repetition
        score = score - frequency * np.float64(count)
        scores[token_id] = score - presence if count > 0 else score
    for token_id in range(len(logits)):
        scores[token_id] *= inverse_temperature
    return _find_maxima(scores, chunk_max)


@kernel
def first_of(scores: Floats, chunk_max: Floats, largest: float) -> int:
    """Returns the lowest id whose score is `largest`."""
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] == largest:
            for token_id in range(chunk * CHUNK, (chunk + 1) * CHUNK):
                if scores[token_id] == largest:
                    return token_id
    return 0


@inlined
def fixed_point_mass(log_ratio: float) -> Any:
    """exp(log_ratio) in units of 2**-42, at least that of `MASS_FLOOR`."""
    shifted = exact_exp(max(log_ratio, MASS_FLOOR)) * _MASS_SCALE + _TWO_52
    return np.float64(shifted).view(np.uint64) - _TWO_52_BITS


@kernel
def _fill_masses(scores: Floats, largest: float, masses: Words) -> None:
    for offset in range(CHUNK):
        masses[offset] = fixed_point_mass(scores[offset] - largest)


@inlined
def _bucket_of(score: float, largest: float) -> int:
    drop = (largest - score) * _BUCKETS_PER_NAT
    return int(drop) if drop < _BUCKETS - 1 else _BUCKETS - 1


@kernel
def _fill_histogram(
    scores: Floats,
    chunk_max: Floats,
    largest: float,
    cut: float,
    last_id: int,
    by_mass: bool,
    histogram: Ints,
) -> Any:
    """Sums weights (masses, or ones) of the surviving ids per bucket of score; returns their total."""
    masses = np.ones(CHUNK, np.uint64)
    total: Any = 0
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] < cut:
            continue
        base = chunk * CHUNK
        if by_mass:
            _fill_masses(scores[base : base + CHUNK], largest, masses)
        for offset in range(CHUNK):
            score = scores[base + offset]
            if score > cut or (score == cut and base + offset <= last_id):
                weight = np.int64(masses[offset])
                histogram[_bucket_of(score, largest)] += weight
                total += weight
    return total


@kernel
def _resolve(found: Floats, ids: Ints, weights: Ints, needed: int) -> tuple[float, int]:
    """Returns the last survivor: where the weights, summed in order of survival, reach `needed`.

    Ids ascend. Quickselect with a three-way split that keeps them ascending; it overwrites the arrays.
    """
    size = len(found)
    while True:
        first, middle, last = found[0], found[size // 2], found[size - 1]
        pivot = max(min(first, middle), min(max(first, middle), last))
        above, equal = 0, 0
        for entry in range(size):
            above += weights[entry] if found[entry] > pivot else 0
            equal += weights[entry] if found[entry] == pivot else 0
        if above < needed <= above + equal:
            rest = needed - above
            for entry in range(size):
                if found[entry] == pivot:
                    rest -= weights[entry]
                    if rest <= 0:
                        return pivot, ids[entry]
        upper = needed <= above
        if not upper:
            needed -= above + equal
        kept = 0
        for entry in range(size):
            inside = found[entry] > pivot if upper else found[entry] < pivot
            found[kept], ids[kept], weights[kept] = found[entry], ids[entry], weights[entry]
            kept += 1 if inside else 0
        size = kept


@kernel
def _tighten(
    scores: Floats,
    chunk_max: Floats,
    largest: float,
    cut: float,
    last_id: int,
    top_k: int,
    top_p: float,
    gathered: tuple[Floats, Ints, Ints],
) -> tuple[float, int]:
    """Returns the cut after top-k (`top_k` > 0), or else after top-p, among the survivors so far."""
    by_mass = top_k == 0
    histogram = np.zeros(_BUCKETS, np.int64)
    total = _fill_histogram(scores, chunk_max, largest, cut, last_id, by_mass, histogram)
    needed: Any = min(np.int64(np.ceil(top_p * np.float64(total))), total) if by_mass else top_k
    if needed >= total and not by_mass:
        return cut, last_id
    bucket = 0
    while needed > histogram[bucket]:
        needed -= histogram[bucket]
        bucket += 1
    found, ids, weights = gathered
    size = 0
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] < cut or _bucket_of(chunk_max[chunk], largest) > bucket:
            continue
        for token_id in range(chunk * CHUNK, (chunk + 1) * CHUNK):
            score = scores[token_id]
            survives = score > cut or (score == cut and token_id <= last_id)
            found[size], ids[size] = score, token_id
            size += 1 if survives and _bucket_of(score, largest) == bucket else 0
    for entry in range(size):
        weights[entry] = np.int64(fixed_point_mass(found[entry] - largest)) if by_mass else 1
    return _resolve(found[:size], ids[:size], weights[:size], needed)


@kernel
def filter_row(
    scores: Floats,
    chunk_max: Floats,
    largest: float,
    log_min_p: float,
    top_k: int,
    top_p: float,
    gathered: tuple[Floats, Ints, Ints],
) -> tuple[float, int]:
    """Returns `(cut, last_id)` after min-p, top-k and top-p; `gathered` is working space."""
    cut, last_id = max(largest + log_min_p, _LOWEST), len(scores)
    if top_k > 0:
        cut, last_id = _tighten(scores, chunk_max, largest, cut, last_id, top_k, top_p, gathered)
    if top_p < 1.0:
        cut, last_id = _tighten(scores, chunk_max, largest, cut, last_id, 0, top_p, gathered)
    return cut, last_id
