"""Tokens and rankings are chosen on the device, for all rows of a step at once, by the noise of `paceline.core.noise`.

From the same float32 logits these are the tokens of the CPU's loops (`backends.cpu.step_kernels.best`), bit for bit,
with temperature, min-p, top-k and top-p, for any request that chooses by its logits alone. Logits themselves differ in
their last bits between devices, and on one device with what else is in a step: then texts agree in distribution only.
Shares of rankings are rounded to float32.

The vocabulary is looked at in blocks of 128 ids, those of the noise. All logits are read once (`_find_maxima`), and
once more where a nucleus is cut out of all of them (`_add_masses`). The rest is one program a row: by
the largest logit of each block it knows which few blocks matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton.language as tl

from paceline.core.calibration import NUM_RANKED
from paceline.engine.backends.cpu import step_kernels
from paceline.engine.backends.cuda.arithmetic import (
    BLOCK,
    EXACT,
    block_noise,
    exact_log,
    first_arrivals,
    in_units,
    mass_of_blocks,
    order_of,
    share,
    value_of,
)
from paceline.engine.backends.cuda.launch import kernel, launch, power_of_two

NOTHING: Final = step_kernels.NOTHING
CHOICE_WORDS: Final = step_kernels.CHOICE.itemsize // 8
"""int64 words of a `CHOICE`."""

# Blocks that a program reads at once.
_TILE: Final = 16
_NOTHING: Final = tl.constexpr(NOTHING)
_WORDS: Final = tl.constexpr(CHOICE_WORDS)
# Where each field of a `CHOICE` lies, in words.
_GREEDY, _INVERSE_TEMPERATURE, _LOG_MIN_P, _TOP_K, _TOP_P, _SEED_LOW, _SEED_HIGH = map(
    tl.constexpr, range(CHOICE_WORDS)
)
_LARGEST: Final = tl.constexpr(3.4028234663852886e38)
_BEHIND_ALL: Final = tl.constexpr(0x7FFFFFFF)
# Blocks in which the nucleus is looked for first.
_FEW: Final = tl.constexpr(64)
# As in `backends.cpu.noise_kernels`: logarithms are less than this off.
_BOUND_MARGIN: Final = tl.constexpr(1e-12)


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """Where a token, or guesses of it, are asked for; on the device.

    Attributes:
        rows: int64 [n], of the logits.
        positions: int64 [n], absolute, of the tokens.
        choices: int64 [n, CHOICE_WORDS], the bytes of a `step_kernels.CHOICE` each.
    """

    rows: torch.Tensor
    positions: torch.Tensor
    choices: torch.Tensor


def choose(logits: torch.Tensor, questions: Questions) -> torch.Tensor:
    """Tokens int32 [n]; NOTHING where the logits leave none. Three launches.

    Args:
        logits: float32 [rows, vocab].
    """
    return _best(logits, questions, 1)[:, 0, 0]


def rank(logits: torch.Tensor, questions: Questions) -> torch.Tensor:
    """The best guesses of each row, best first; arguments and launches as for `choose`.

    Returns:
        int32 [n, 2, NUM_RANKED]: tokens, NOTHING behind the last, and the bits of their shares, which are float32:
        exponentials of scores, noise included, beside the best one's.
    """
    return _best(logits, questions, NUM_RANKED)


def _best(logits: torch.Tensor, questions: Questions, count: int) -> torch.Tensor:
    assert logits.dtype == torch.float32, f"logits must be float32, are {logits.dtype}"
    assert logits.stride(1) == 1, "the logits of a row must be contiguous"
    num, vocab = len(questions.rows), logits.shape[1]
    blocks = -(-vocab // BLOCK.value)
    tiles = -(-blocks // _TILE)
    maxima = logits.new_empty((num, blocks))
    masses = logits.new_empty((num, tiles), dtype=torch.int64)
    # A list of blocks for each row.
    places = logits.new_empty((num, blocks), dtype=torch.int32)
    found = logits.new_empty((num, 2, count), dtype=torch.int32)
    row = (logits, logits.stride(0), vocab, questions.rows)
    sizes = {"BLOCKS": blocks, "PADDED": power_of_two(blocks), "TILE": _TILE, **EXACT}
    launch(_find_maxima, (num, tiles), *row, maxima, **sizes, num_warps=4)
    launch(_add_masses, (num, tiles), *row, questions.choices, maxima, masses, **sizes, num_warps=4)
    launch(
        _choose, (num,), *row, questions.positions, questions.choices, maxima, masses, places, found, **sizes,
        TILES=tiles, PADDED_TILES=power_of_two(tiles), VISITED=4 if count == 1 else 8, COUNT=count, num_warps=8,
    )  # fmt: skip
    return found


@kernel
def _find_maxima(
    logits, stride, vocab, rows, maxima, BLOCKS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The largest logit of each block; NaN where one is."""
    each, block = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    value, _ = _read(logits + tl.load(rows + each) * stride, vocab, block, block < BLOCKS)
    spoiled = tl.max((value != value).to(tl.int32), 1) > 0
    largest = tl.where(spoiled, float("nan"), tl.max(value, 1))
    tl.store(maxima + each * BLOCKS + block, largest, mask=block < BLOCKS)


@kernel
def _add_masses(
    logits, stride, vocab, rows, choices, maxima, masses,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The mass of a tile's ids that min-p leaves, where a nucleus of all of them is asked for."""
    each = tl.program_id(0)
    choice = choices + each * _WORDS
    if (_number(choice + _TOP_P) >= 1.0) | (tl.load(choice + _TOP_K) > 0):
        return
    largest, usable = _largest_of(_maxima_of(maxima, each, BLOCKS, PADDED))
    if not usable:
        return
    inverse = _number(choice + _INVERSE_TEMPERATURE)
    cut = _min_p_cut(choice, largest, inverse)
    block = tl.program_id(1) * TILE + tl.arange(0, TILE)
    value, _ = _read(logits + tl.load(rows + each) * stride, vocab, block, block < BLOCKS)
    shares = tl.where(value >= cut, share(value, largest, inverse.to(tl.float32)), 0.0)
    tl.store(masses + each * tl.num_programs(1) + tl.program_id(1), tl.sum(mass_of_blocks(shares, TILE), 0))


@kernel
def _choose(
    logits, stride, vocab, rows, positions, choices, maxima, masses, places, found,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, PADDED_TILES: tl.constexpr, VISITED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """The best of one row."""
    each, entry = tl.program_id(0), tl.arange(0, COUNT)
    tokens = found + each * 2 * COUNT
    row, choice = logits + tl.load(rows + each) * stride, choices + each * _WORDS
    block_max = _maxima_of(maxima, each, BLOCKS, PADDED)
    largest, usable = _largest_of(block_max)
    if not usable:
        tl.store(tokens + entry, tl.full((COUNT,), _NOTHING, tl.int32))
        tl.store(tokens + COUNT + entry, tl.zeros((COUNT,), tl.int32))
        return
    place, tile = places + each * BLOCKS, tl.arange(0, PADDED_TILES)
    mass = tl.sum(tl.load(masses + each * TILES + tile, mask=tile < TILES, other=0), 0)
    cut, last_id = _filter(row, vocab, block_max, largest, choice, mass, place, BLOCKS, TILE)
    position = tl.load(positions + each)
    score, token = _best_of(row, vocab, block_max, cut, last_id, choice, position, place, VISITED, COUNT)
    tl.store(tokens + entry, tl.where(score == -float("inf"), _NOTHING, token))
    shares = tl.exp((score - tl.max(score, 0)).to(tl.float32))
    tl.store(tokens + COUNT + entry, shares.to(tl.int32, bitcast=True))


@kernel
def _number(word):
    return tl.load(word).to(tl.float64, bitcast=True)


@kernel
def _maxima_of(maxima, each, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    block = tl.arange(0, PADDED)
    return tl.load(maxima + each * BLOCKS + block, mask=block < BLOCKS, other=-float("inf"))


@kernel
def _largest_of(block_max):
    """The largest logit, and whether it leaves something to choose: NaN, +inf, or nothing but -inf do not."""
    largest = tl.max(block_max, 0)
    spoiled = tl.max((block_max != block_max).to(tl.int32), 0) > 0
    return largest, (not spoiled) & (largest < float("inf")) & (largest > -float("inf"))


@kernel
def _read(row, vocab, block, there):
    """The logits of blocks [n, BLOCK], -inf behind the last, and their ids."""
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    return tl.load(row + ids, mask=there[:, None] & (ids < vocab), other=-float("inf")), ids


@kernel
def _list(wanted, place):
    """Lists the blocks that are wanted, in ascending order; returns how many."""
    behind = tl.cumsum(wanted.to(tl.int32), 0)
    # Others may still read what was listed before.
    tl.debug_barrier()
    tl.store(place + behind - 1, tl.arange(0, wanted.shape[0]), mask=wanted)
    tl.debug_barrier()
    return tl.max(behind, 0)


@kernel
def _read_listed(row, vocab, place, start, listed, TILE: tl.constexpr):
    """Some of the listed blocks: numbers, logits and ids."""
    entry = start + tl.arange(0, TILE)
    block = tl.load(place + entry, mask=entry < listed, other=0)
    value, ids = _read(row, vocab, block, entry < listed)
    return block, value, ids


# Filters: survivors are the logits above a cut, and those equal to it up to a last id.


@kernel
def _survive(value, ids, cut, last_id):
    return (value > cut) | ((value == cut) & (ids <= last_id))


@kernel
def _filter(
    row, vocab, block_max, largest, choice, mass, place, BLOCKS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The cut and the last id after min-p, top-k and top-p."""
    inverse, top_k, top_p = _number(choice + _INVERSE_TEMPERATURE), tl.load(choice + _TOP_K), _number(choice + _TOP_P)
    scale, last_id = inverse.to(tl.float32), tl.full((), _BEHIND_ALL, tl.int32)
    cut = _min_p_cut(choice, largest, inverse)
    if top_k > 0:
        # As many blocks have an id each of at least this.
        level = _level(block_max, top_k, cut) if top_k <= BLOCKS else cut
        cut, last_id = _narrow(
            row, vocab, block_max, largest, scale, cut, last_id, level, top_k, place, False, TILE
        )  # fmt: skip
    if top_p < 1.0:
        level = cut
        if top_k > 0:
            _, mass, _, _ = _weigh(row, vocab, block_max, largest, scale, cut, last_id, cut, place, True, TILE)
        else:
            # What models give is peaked: nearly always the nucleus is in a few blocks.
            level = _level(block_max, _FEW, cut)
        needed = tl.minimum(tl.ceil(top_p * mass.to(tl.float64)).to(tl.int64), mass)
        cut, last_id = _narrow(
            row, vocab, block_max, largest, scale, cut, last_id, level, needed, place, True, TILE
        )  # fmt: skip
    return cut, last_id


@kernel
def _min_p_cut(choice, largest, inverse):
    """The least logit whose score is close enough to the largest one."""
    log_min_p, cut = _number(choice + _LOG_MIN_P), tl.full((), -_LARGEST, tl.float32)
    if log_min_p > -float("inf"):
        threshold = largest.to(tl.float64) * inverse + log_min_p
        below, least = order_of(cut) - 1, order_of(largest)
        while least - below > 1:
            middle = (least + below) >> 1
            reached = value_of(middle).to(tl.float64) * inverse >= threshold
            least, below = tl.where(reached, middle, least), tl.where(reached, below, middle)
        cut = value_of(least)
    return cut


@kernel
def _level(values, number, least):
    """A value that at least `number` of these reach, and not many more; `least` where fewer reach that."""
    low, high = order_of(least), order_of(tl.max(values, 0)) + 1
    reached = tl.full((), values.shape[0], tl.int32)
    while (high - low > 1) & (reached > 2 * number):
        middle = (low + high) >> 1
        count = tl.sum((values >= value_of(middle)).to(tl.int32), 0)
        enough = count >= number
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        reached = tl.where(enough, count, reached)
    return value_of(low)


@kernel
def _weigh(
    row, vocab, block_max, largest, scale, cut, last_id, least, place, BY_MASS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Weighs the survivors whose logits are at least `least`.

    Returns:
        How many there are, and their mass (their number again unless BY_MASS). The least logit among them, and one that
        no logit below `least` exceeds.
    """
    listed = _list(block_max >= least, place)
    counts, masses = tl.zeros((TILE, BLOCK), tl.int32), tl.zeros((TILE, BLOCK), tl.int64)
    lowest, next_ones = tl.full((TILE, BLOCK), _LARGEST, tl.float32), tl.full((TILE, BLOCK), -_LARGEST, tl.float32)
    for start in range(0, listed, TILE):
        _, value, ids = _read_listed(row, vocab, place, start, listed, TILE)
        kept = (value >= least) & _survive(value, ids, cut, last_id)
        counts += kept.to(tl.int32)
        lowest = tl.minimum(lowest, tl.where(kept, value, _LARGEST))
        next_ones = tl.maximum(next_ones, tl.where(value < least, value, -_LARGEST))
        if BY_MASS:
            masses += tl.where(kept, in_units(share(value, largest, scale)), 0)
    count = tl.sum(tl.sum(counts, 1), 0).to(tl.int64)
    mass = tl.sum(tl.sum(masses, 1), 0) if BY_MASS else count
    beside = tl.max(tl.where(block_max < least, block_max, -_LARGEST), 0)
    return count, mass, tl.min(tl.min(lowest, 1), 0), tl.maximum(beside, tl.max(tl.max(next_ones, 1), 0))


@kernel
def _narrow(
    row, vocab, block_max, largest, scale, cut, last_id, level, needed, place,
    BY_MASS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The cut and last id of the fewest survivors that weigh `needed`; of all of them where they weigh less.

    Args:
        level: A logit from `cut` up that is looked at first.
    """
    # Those of at least `high` weigh less than what is needed, those of at least `low` as much or more.
    high, above, weight_above = order_of(largest) + 1, tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    count, weight, lowest, under = _weigh(
        row, vocab, block_max, largest, scale, cut, last_id, level, place, BY_MASS, TILE
    )  # fmt: skip
    if (weight < needed) & (level > cut):
        high, above, weight_above = order_of(under) + 1, count, weight
        count, weight, lowest, _ = _weigh(
            row, vocab, block_max, largest, scale, cut, last_id, cut, place, BY_MASS, TILE
        )  # fmt: skip
    if weight >= needed:
        low = order_of(lowest)
        while (high - low > 1) & (count - above > 1):
            middle = (low + high) >> 1
            at, weight_at, lowest, under = _weigh(
                row, vocab, block_max, largest, scale, cut, last_id, value_of(middle), place, BY_MASS, TILE
            )  # fmt: skip
            enough = weight_at >= needed
            # Of two zeros the lower one may come back.
            low = tl.where(enough, tl.maximum(order_of(lowest), middle), low)
            high = tl.where(enough, high, order_of(under) + 1)
            count, above = tl.where(enough, at, count), tl.where(enough, above, at)
            weight, weight_above = tl.where(enough, weight_at, weight), tl.where(enough, weight_above, weight_at)
        least = value_of(low)
        last = tl.where(least == cut, last_id, _BEHIND_ALL)
        if count - above > 1:
            # All these are equal: of some of them there are enough.
            each = (weight - weight_above) // (count - above)
            wanted = (needed - weight_above + each - 1) // each
            last = _nth_equal(row, vocab, block_max, cut, last_id, least, wanted, place, TILE)
        cut, last_id = least, last
    return cut, last_id


@kernel
def _nth_equal(row, vocab, block_max, cut, last_id, level, number, place, TILE: tl.constexpr):
    """The id of the so manieth survivor whose logit is `level`."""
    listed = _list(block_max >= level, place)
    before, found = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32)
    for start in range(0, listed, TILE):
        _, value, ids = _read_listed(row, vocab, place, start, listed, TILE)
        equal = tl.reshape((value == level) & _survive(value, ids, cut, last_id), (TILE * BLOCK,)).to(tl.int32)
        hit = (equal > 0) & (before + tl.cumsum(equal, 0) == number)
        found = tl.maximum(found, tl.max(tl.where(hit, tl.reshape(ids, (TILE * BLOCK,)), 0), 0))
        before += tl.sum(equal, 0)
    return found


# The best of the survivors, by their noise


@kernel
def _best_of(
    row, vocab, block_max, cut, last_id, choice, position, place, VISITED: tl.constexpr, COUNT: tl.constexpr
):  # fmt: skip
    """Scores and ids of the best, best first; -inf behind the last.

    A block's perturbed scores do not exceed its largest score plus its largest noise. The most promising blocks come
    first: what they give rules out nearly all others.
    """
    inverse, is_greedy = _number(choice + _INVERSE_TEMPERATURE), (tl.load(choice + _GREEDY) & 0xFF) != 0
    seed = tl.load(choice + _SEED_LOW) | (tl.load(choice + _SEED_HIGH) << 32)
    bound = block_max.to(tl.float64) * inverse
    if not is_greedy:
        first, _ = first_arrivals(tl.arange(0, block_max.shape[0]), seed, position)
        bound += _BOUND_MARGIN - exact_log(first)
    rough = tl.where(block_max >= cut, bound, -float("inf")).to(tl.float32)
    level = _level(rough, COUNT, tl.full((), -_LARGEST, tl.float32))
    score, token = tl.full((COUNT,), -float("inf"), tl.float64), tl.full((COUNT,), _BEHIND_ALL, tl.int32)
    wanted = rough >= level
    for _ in range(2):
        score, token = _visit(
            row, vocab, wanted, cut, last_id, inverse, is_greedy, seed, position, place, score, token,
            VISITED, COUNT,
        )  # fmt: skip
        wanted = (rough < level) & (block_max >= cut) & (bound >= tl.min(score, 0))
    return score, token


@kernel
def _visit(
    row, vocab, wanted, cut, last_id, inverse, is_greedy, seed, position, place, best, best_ids,
    TILE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Looks through the blocks that are wanted for something better."""
    listed = _list(wanted, place)
    for start in range(0, listed, TILE):
        block, value, ids = _read_listed(row, vocab, place, start, listed, TILE)
        score = value.to(tl.float64) * inverse
        if not is_greedy:
            score += block_noise(block, seed, position, TILE)
        score = tl.where(_survive(value, ids, cut, last_id), score, -float("inf"))
        score, ids = tl.reshape(score, (TILE * BLOCK,)), tl.reshape(ids, (TILE * BLOCK,))
        best, best_ids = _merge(score, ids, best, best_ids, COUNT)
    return best, best_ids


@kernel
def _merge(score, ids, best, best_ids, COUNT: tl.constexpr):
    """The best of these and of those: largest score first, lowest id among equals."""
    entry = tl.arange(0, COUNT)
    merged, merged_ids = tl.full((COUNT,), -float("inf"), tl.float64), tl.full((COUNT,), _BEHIND_ALL, tl.int32)
    last, last_id = tl.full((), float("inf"), tl.float64), tl.full((), -1, tl.int32)
    for each in range(COUNT):
        new, new_id = _next(score, ids, last, last_id)
        old, old_id = _next(best, best_ids, last, last_id)
        better = (new > old) | ((new == old) & (new_id < old_id))
        last, last_id = tl.where(better, new, old), tl.where(better, new_id, old_id)
        merged, merged_ids = tl.where(entry == each, last, merged), tl.where(entry == each, last_id, merged_ids)
    return merged, merged_ids


@kernel
def _next(score, ids, last, last_id):
    """The best one behind another."""
    behind = (score < last) | ((score == last) & (ids > last_id))
    best = tl.max(tl.where(behind, score, -float("inf")), 0)
    return best, tl.min(tl.where(behind & (score == best), ids, _BEHIND_ALL), 0)
