"""Compiled loops over one row of logits: what a request changes in it, and which ids survive its filters.

`chunk_max` holds the largest logit of each `CHUNK` ids, so that chunks that cannot matter are skipped: of 150,000 ids a
few thousand are looked at more than once. Survivors are always a head of the order (largest logit first, lowest id
among equals), hence given by two numbers: logits above `cut`, and those equal to `cut` with ids up to `last_id`. The
arithmetic is that of `paceline.core.processors`, bit by bit. The loops release the GIL and know no request, session or
noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core import noise, processors
from paceline.kernel_cache import inlined, kernel

CHUNK = noise.BLOCK
# Chunks in which the nucleus is looked for first.
_FEW = 64
_LANES, _BUCKETS = 16, 512
_BUCKETS_PER_NAT, _LAST_BUCKET = np.float32(16.0), np.float32(511.0)
_MASS_SCALE, _LEAST_RATIO = processors.MASS_SCALE, processors.LEAST_RATIO
_LEAST_EXPONENT = -700.0
_TWO_52, _TWO_52_BITS = 2.0**52, np.int64(0x4330000000000000)
_LARGEST = np.finfo(np.float32).max
_SIGN, _LOWEST, _HIGHEST = np.int32(31), np.int32(-(2**31)), np.int32(2**31 - 1)
_MINUS_INFINITY = np.int32(-0x7F800001)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.uint8]
Logits = npt.NDArray[np.float32]

exact_exp = inlined(noise.exact_exp)
_share = inlined(processors.share)


@kernel
def process_row(
    row: Logits,
    bias_ids: Ints,
    biases: Floats,
    masked_ids: Ints,
    allowed: Bits,
    seen_ids: Ints,
    seen_counts: Ints,
    penalties: tuple[float, float, float],
) -> None:
    """Changes a row of logits as a request asks.

    Args:
        row: float32 `[vocab]`.
        bias_ids: int64 `[n]`, with their biases, float64 `[n]`.
        masked_ids: int64 `[m]`.
        allowed: One bit an id, as `paceline.core.grammar.Bits`; empty: all are.
        seen_ids: int64 `[s]`, of prompt and output, with their counts in the output; 0 for ids of the prompt alone.
        penalties: Repetition, frequency, presence.
    """
    for entry in range(len(bias_ids)):
        row[bias_ids[entry]] = np.float32(np.float64(row[bias_ids[entry]]) + biases[entry])
    for entry in range(len(masked_ids)):
        row[masked_ids[entry]] = -np.inf
    for place in range(len(allowed)):
        byte = allowed[place]
        if byte == 0:
            # Of 150,000 ids a grammar mostly allows a few: this halves the time of a mask.
            row[8 * place : 8 * place + 8] = -np.inf
        elif byte != 255:
            for token_id in range(8 * place, min(8 * place + 8, len(row))):
                if not (byte >> (token_id - 8 * place)) & 1:
                    row[token_id] = -np.inf
    repetition, frequency, presence = penalties
    for entry in range(len(seen_ids)):
        token_id, count = seen_ids[entry], seen_counts[entry]
        score = np.float64(row[token_id])
        score = score / repetition if score > 0.0 else score * repetition
        score = score - frequency * np.float64(count)
        row[token_id] = np.float32(score - presence if count > 0 else score)


@inlined
def _ordered(bits: Any) -> Any:
    """The bits of float32 as whole numbers of the same order, with NaN beyond either infinity; its own inverse."""
    return bits ^ ((bits >> _SIGN) & _HIGHEST)


@inlined
def _float_of(order: Any) -> Any:
    return np.int32(_ordered(order)).view(np.float32)


@kernel
def find_maxima(row: Logits, chunk_max: Logits) -> float:
    """Fills `chunk_max` and returns the largest logit, or NaN if any is NaN."""
    # Loops over whole numbers of known length vectorise; those that compare what may be NaN do not.
    bits, lowest, whole = row.view(np.int32), _HIGHEST, len(row) // CHUNK
    for chunk in range(whole):
        top, low = _LOWEST, _HIGHEST
        for token_id in range(chunk * CHUNK, chunk * CHUNK + CHUNK):
            order = np.int32(_ordered(bits[token_id]))
            top, low = max(top, order), min(low, order)
        chunk_max[chunk], lowest = _float_of(top), min(lowest, low)
    if whole < len(chunk_max):
        top = _LOWEST
        for token_id in range(whole * CHUNK, len(row)):
            order = np.int32(_ordered(bits[token_id]))
            top, lowest = max(top, order), min(lowest, order)
        chunk_max[whole] = _float_of(top)
    # Beyond infinity are only those that are no number.
    return np.nan if lowest < _MINUS_INFINITY else np.float64(_largest_of(chunk_max))


@kernel
def _largest_of(chunk_max: Logits) -> Any:
    largest = chunk_max[0]
    for value in chunk_max:
        if not value <= largest:
            largest = value
        if value != value:
            return value
    return largest


@kernel
def level_of(values: Any, number: int) -> Any:
    """A value that at least `number` of these reach, or all of them, and not many more."""
    highest, lowest = values.max(), np.inf
    for value in values:
        lowest = min(lowest, value) if value > -np.inf else lowest
    if number >= len(values) or not highest > lowest:
        return values.min()
    scale, counts = (_BUCKETS - 1) / (np.float64(highest) - lowest), np.zeros(_BUCKETS, np.int64)
    for value in values:
        counts[_bucket_of(value, highest, scale)] += 1
    bucket, above = 0, counts[0]
    while above < number:
        bucket += 1
        above += counts[bucket]
    level = highest
    for value in values:
        level = min(level, value) if _bucket_of(value, highest, scale) <= bucket else level
    return level


@inlined
def _bucket_of(value: Any, highest: Any, scale: float) -> int:
    drop = (np.float64(highest) - np.float64(value)) * scale
    return int(drop) if drop < _BUCKETS - 1 else _BUCKETS - 1


@inlined
def _share_of(logit: Any, largest: Any, scale: Any) -> Any:
    return _share(max((logit - largest) * scale, _LEAST_RATIO))


@inlined
def _in_units(mass: Any) -> Any:
    """Rounds to a whole number of units, below 2**52: by the bits of a sum, which vectorises."""
    return np.float64(np.float64(mass) * _MASS_SCALE + _TWO_52).view(np.int64) - _TWO_52_BITS


@inlined
def _mass_of(logit: Any, largest: Any, scale: Any) -> Any:
    """The share of an id beside that of the largest, in units of 1 / MASS_SCALE."""
    return _in_units(_share_of(logit, largest, scale))


@kernel
def _mass_of_all(row: Logits, largest: Any, scale: Any, cut: Any) -> Any:
    """The mass of all ids whose logits are at least `cut`, added up in float32 for each chunk."""
    shares, nothing, total = np.empty(CHUNK, np.float32), np.float32(0.0), np.int64(0)
    whole = len(row) // CHUNK
    for chunk in range(whole):
        base = chunk * CHUNK
        for offset in range(CHUNK):
            share = _share_of(row[base + offset], largest, scale)
            shares[offset] = share if row[base + offset] >= cut else nothing
        total += _mass_of_chunk(shares)
    if whole * CHUNK < len(row):
        shares[:] = nothing
        for token_id in range(whole * CHUNK, len(row)):
            share = _share_of(row[token_id], largest, scale)
            shares[token_id - whole * CHUNK] = share if row[token_id] >= cut else nothing
        total += _mass_of_chunk(shares)
    return total


@inlined
def _mass_of_chunk(shares: Any) -> Any:
    """Adds the upper half to the lower one until one share is left; overwrites them."""
    for offset in range(64):
        shares[offset] += shares[offset + 64]
    for offset in range(32):
        shares[offset] += shares[offset + 32]
    for offset in range(16):
        shares[offset] += shares[offset + 16]
    for offset in range(8):
        shares[offset] += shares[offset + 8]
    for offset in range(4):
        shares[offset] += shares[offset + 4]
    mass = (shares[0] + shares[2]) + (shares[1] + shares[3])
    return _in_units(mass)


@kernel
def _gather(row: Logits, chunk_max: Logits, level: Any, last_id: int, found: Logits, ids: Ints) -> int:
    """Gathers ids whose logits exceed a level, or equal it and are not beyond `last_id`, in ascending order."""
    size, hits = 0, np.empty(CHUNK, np.uint8)
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] < level:
            continue
        # Comparing all of a chunk first vectorises.
        first = chunk * CHUNK
        part = row[first : min(first + CHUNK, len(row))]
        for offset in range(len(part)):
            hits[offset] = (part[offset] > level) | ((part[offset] == level) & (first + offset <= last_id))
        for offset in range(len(part)):
            if hits[offset]:
                found[size], ids[size] = part[offset], first + offset
                size += 1
    return size


@kernel
def _resolve(found: Logits, ids: Ints, weights: Ints, needed: Any) -> tuple[Any, int]:
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
def _most_likely(row: Logits, chunk_max: Logits, cut: Any, number: int, gathered: Any) -> tuple[Any, int]:
    """The cut that leaves so many ids of those whose logits are at least `cut`."""
    found, ids, weights = gathered
    # As many chunks have an id each of at least this.
    level = max(level_of(chunk_max, number), cut) if number <= len(chunk_max) else cut
    size = _gather(row, chunk_max, level, len(row), found, ids)
    if size <= number:
        return level, len(row)
    weights[:size] = 1
    return _resolve(found[:size], ids[:size], weights[:size], number)


@kernel
def _nucleus(
    row: Logits,
    chunk_max: Logits,
    largest: Any,
    scale: Any,
    cut: Any,
    last_id: int,
    few: bool,
    top_p: float,
    gathered: Any,
) -> tuple[Any, int]:
    """The cut that leaves the fewest survivors that hold a share of their mass.

    `few`: top-k has left no more than it was asked for; else `last_id` is behind all ids.
    """
    found, ids, weights = gathered
    total = np.int64(0) if few else _mass_of_all(row, largest, scale, cut)
    # What models give is peaked: nearly always the nucleus is in a few chunks.
    level = cut if few else max(cut, level_of(chunk_max, _FEW))
    size = _gather(row, chunk_max, level, last_id, found, ids)
    mass = _weigh(found[:size], largest, scale, weights)
    total = mass if few else total
    needed = min(np.int64(np.ceil(top_p * np.float64(total))), total)
    if mass < needed and level > cut:
        size, needed = _gather_last(row, chunk_max, largest, scale, cut, needed, gathered)
        mass = _weigh(found[:size], largest, scale, weights)
    if mass < needed:
        return cut, last_id
    return _resolve(found[:size], ids[:size], weights[:size], needed)


@kernel
def _weigh(found: Logits, largest: Any, scale: Any, weights: Ints) -> Any:
    """Fills in the masses of ids and adds them up."""
    mass = np.int64(0)
    for entry in range(len(found)):
        weights[entry] = _mass_of(found[entry], largest, scale)
        mass += weights[entry]
    return mass


@inlined
def _drop_of(logit: Any, largest: Any, per_nat: Any) -> Any:
    """The bucket of a logit by how far it is below the largest."""
    return np.int32(min((largest - logit) * per_nat, _LAST_BUCKET))


@kernel
def _gather_last(
    row: Logits, chunk_max: Logits, largest: Any, scale: Any, cut: Any, needed: Any, gathered: Any
) -> tuple[int, Any]:
    """Gathers ids among which the last one of a nucleus is; returns how many, and how much mass is needed of them.

    Masses are added up by the drop of the logit first, so that few ids are looked at one by one.
    """
    found, ids, _ = gathered
    masses, buckets, hits = np.empty(CHUNK, np.int64), np.empty(CHUNK, np.int32), np.empty(CHUNK, np.uint8)
    histogram, per_nat = np.zeros(_BUCKETS, np.int64), scale * _BUCKETS_PER_NAT
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] >= cut:
            part = row[chunk * CHUNK : min(chunk * CHUNK + CHUNK, len(row))]
            for offset in range(len(part)):
                masses[offset] = _mass_of(part[offset], largest, scale) if part[offset] >= cut else 0
            for offset in range(len(part)):
                buckets[offset] = _drop_of(part[offset], largest, per_nat)
            for offset in range(len(part)):
                histogram[buckets[offset]] += masses[offset]
    bucket = 0
    while bucket < _BUCKETS - 1 and needed > histogram[bucket]:
        needed -= histogram[bucket]
        bucket += 1
    # A little wider than the bucket, since few ids are left to look at there.
    high, size = np.float32(largest - (bucket - 0.01) / per_nat), 0
    low = max(cut, np.float32(largest - (bucket + 1.01) / per_nat)) if bucket < _BUCKETS - 1 else cut
    for chunk in range(len(chunk_max)):
        if chunk_max[chunk] < low:
            continue
        first, count = chunk * CHUNK, 0
        part = row[first : min(first + CHUNK, len(row))]
        for offset in range(len(part)):
            hits[offset] = (part[offset] >= low) & (part[offset] <= high)
            count += hits[offset]
        for offset in range(len(part) if count else 0):
            if hits[offset] and _drop_of(part[offset], largest, per_nat) == bucket:
                found[size], ids[size] = part[offset], first + offset
                size += 1
    return size, needed


@kernel
def _least_logit(threshold: Any, inverse_temperature: float) -> Any:
    """The least logit whose score is at least a threshold."""
    logit: Any = np.float32(max(min(threshold / inverse_temperature, _LARGEST), -_LARGEST))
    while np.float64(logit) * inverse_temperature < threshold:
        logit = np.nextafter(logit, np.float32(np.inf))
    below = np.nextafter(logit, np.float32(-np.inf))
    while below >= -_LARGEST and np.float64(below) * inverse_temperature >= threshold:
        logit, below = below, np.nextafter(below, np.float32(-np.inf))
    return logit


@kernel
def filter_row(row: Logits, chunk_max: Logits, largest: float, choice: Any, gathered: Any) -> tuple[Any, int]:
    """Returns `(cut, last_id)` after min-p, top-k and top-p.

    Args:
        row: float32 `[vocab]`.
        chunk_max: float32 `[chunks]`.
        largest: Of the row.
        choice: `paceline.core.processors.Truncation`, as a record.
        gathered: Working space for ids that may be the last ones: logits, ids, weights, `[vocab + 1]`.
    """
    cut, last_id = np.float32(-_LARGEST), len(row)
    if choice.log_min_p > -np.inf:
        cut = _least_logit(largest * choice.inverse_temperature + choice.log_min_p, choice.inverse_temperature)
    if choice.top_k > 0:
        cut, last_id = _most_likely(row, chunk_max, cut, choice.top_k, gathered)
    if choice.top_p < 1.0:
        scale, few = np.float32(choice.inverse_temperature), choice.top_k > 0
        cut, last_id = _nucleus(row, chunk_max, np.float32(largest), scale, cut, last_id, few, choice.top_p, gathered)
    return cut, last_id


@kernel
def sum_of_exp(row: Logits, largest: float) -> Any:
    """The sum of exp(logit - largest) over a row, in float64."""
    lanes, whole = np.zeros(_LANES), len(row) - len(row) % _LANES
    for first in range(0, whole, _LANES):
        for lane in range(_LANES):
            lanes[lane] += exact_exp(max(np.float64(row[first + lane]) - largest, _LEAST_EXPONENT))
    for token_id in range(whole, len(row)):
        lanes[0] += exact_exp(max(np.float64(row[token_id]) - largest, _LEAST_EXPONENT))
    return lanes.sum()
