"""Sampling as it is defined, in plain numpy: processors and noise that the compiled loops of the engine must repeat.

Order, meaning and arithmetic are those of `paceline.core.processors` and `paceline.core.noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.grammar import Allowed
from paceline.core.noise import BLOCK, BLOCK_STREAM, exact_log, philox4x32, split_uint64
from paceline.core.params import SamplingParams
from paceline.core.processors import (
    LEAST_RATIO,
    MASS_SCALE,
    Truncation,
    ends_of_bad_words,
    masked_until_min_tokens,
    require_usable,
    share,
)

FloatArray = npt.NDArray[np.float64]
Row = npt.NDArray[np.float32]


def noise_words(seed: int, position: int, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Returns one 32-bit random word per token id, shape of `token_ids`.

    Key = seed (low, high); counter = (token_id // 4, position low, position high, stream 0), word token_id
    % 4.
    """
    ids = np.asarray(token_ids, dtype=np.uint64)
    block = philox4x32(ids >> np.uint64(2), *split_uint64(position), np.uint64(0), *split_uint64(seed))
    words: npt.NDArray[np.uint64] = np.choose((ids & np.uint64(3)).astype(np.intp), block)
    return words


def block_words(seed: int, position: int, blocks: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.uint64], ...]:
    """Returns two words per block of ids: for its first arrival, and for whose that is."""
    numbers = np.asarray(blocks, dtype=np.uint64)
    drawn = philox4x32(numbers >> np.uint64(1), *split_uint64(position), np.uint64(BLOCK_STREAM), *split_uint64(seed))
    odd = (numbers & np.uint64(1)).astype(bool)
    return np.where(odd, drawn[2], drawn[0]), np.where(odd, drawn[3], drawn[1])


def exponential(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Returns a standard exponential variate per word, which float64 holds exactly but for the logarithm."""
    variates: npt.NDArray[np.float64] = -exact_log((words.astype(np.float64) + 0.5) * 2.0**-32)
    return variates


def gumbel(seed: int, position: int, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Returns a standard Gumbel variate per token id, float64, shape of `token_ids`.

    `seed` is a uint64, `position` the absolute position that the token will take in its sequence, prompt included.
    """
    ids = np.asarray(token_ids)
    first_words, place_words = block_words(seed, position, ids // BLOCK)
    is_first = ids % BLOCK == (place_words >> np.uint64(25)).astype(ids.dtype)
    waits = np.where(is_first, 0.0, exponential(noise_words(seed, position, ids)))
    variates: npt.NDArray[np.float64] = -exact_log(exponential(first_words) / BLOCK + waits)
    return variates


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHistory:
    """The prefix that a row's processors see, and what the request's grammar, if it has one, lets follow it."""

    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()
    allowed: Allowed | None = None


def masses_of(logits: npt.NDArray[np.float32], largest: np.float32, truncation: Truncation) -> npt.NDArray[np.float32]:
    """Returns the share of each id beside that of the largest logit, in float32."""
    ratios = (logits - largest) * np.float32(truncation.inverse_temperature)
    shares: npt.NDArray[np.float32] = share(np.maximum(ratios, LEAST_RATIO))
    return shares


def in_units(shares: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
    """Returns masses as integers, whose sums do not depend on their order."""
    return np.rint(shares.astype(np.float64) * MASS_SCALE).astype(np.int64)


def mass_of_all(shares: npt.NDArray[np.float32]) -> int:
    """Returns the mass of a row of shares: in each block the upper half is added to the lower one, in float32."""
    padded = np.zeros(-(-len(shares) // BLOCK) * BLOCK, np.float32)
    padded[: len(shares)] = shares
    sums = padded.reshape(-1, BLOCK)
    while sums.shape[1] > 1:
        sums = sums[:, : sums.shape[1] // 2] + sums[:, sums.shape[1] // 2 :]
    return int(in_units(sums).sum())


def process(logits: npt.NDArray[np.float32], params: SamplingParams, history: RowHistory) -> FloatArray:
    """Returns log weights [vocab], float64, up to a constant; -inf for ids that the request rules out.

    At temperature 0 these are the biased and penalised logits.

    Raises:
        UnusableLogitsError: The logits hold NaN or +inf, or nothing is left to choose.
    """
    row = _penalised(_biased(np.asarray(logits, dtype=np.float32), params, history), params, history)
    truncation = Truncation.of(params)
    weights = row.astype(np.float64) * truncation.inverse_temperature
    require_usable(float(weights.max()))
    return np.where(_kept(row, weights, truncation), weights, -np.inf)


def _biased(row: Row, params: SamplingParams, history: RowHistory) -> Row:
    weights = row.copy()
    for token_id, bias in params.logit_bias:
        weights[token_id] = np.float64(weights[token_id]) + bias
    if params.allowed_token_ids:
        weights[np.setdiff1d(np.arange(len(weights)), params.allowed_token_ids)] = -np.inf
    weights[ends_of_bad_words(params.bad_words, history.output_token_ids)] = -np.inf
    if history.allowed is not None:
        weights[np.unpackbits(history.allowed.bits, bitorder="little")[: len(weights)] == 0] = -np.inf
    ended = history.allowed is not None and history.allowed.ended
    if len(history.output_token_ids) < params.min_tokens and not ended:
        weights[list(masked_until_min_tokens(params, history.eos_token_ids))] = -np.inf
    return weights


def _penalised(row: Row, params: SamplingParams, history: RowHistory) -> Row:
    weights = row.astype(np.float64)
    outputs = np.asarray(history.output_token_ids, dtype=np.intp)
    prompt = np.asarray(history.prompt_token_ids, dtype=np.intp)
    counts = np.bincount(outputs, minlength=len(weights)).astype(np.float64)
    seen = (counts > 0) | (np.bincount(prompt, minlength=len(weights)) > 0)
    penalty = params.repetition_penalty
    repeated = np.where(weights > 0.0, weights / penalty, weights * penalty)
    weights = np.where(seen, repeated, weights)
    weights = weights - params.frequency_penalty * counts
    return np.where(counts > 0, weights - params.presence_penalty, weights).astype(np.float32)


def _kept(row: Row, weights: FloatArray, truncation: Truncation) -> npt.NDArray[np.bool_]:
    """Which ids survive all filters: a head of the order (largest weight first, lowest id among equals)."""
    order = np.argsort(-weights, kind="stable")
    largest = weights[order[0]]
    order = order[weights[order] >= max(largest + truncation.log_min_p, -np.finfo(np.float64).max)]
    if truncation.top_k > 0:
        order = order[: truncation.top_k]
    if truncation.top_p < 1.0:
        shares = masses_of(row, row[order[0]], truncation)
        masses = in_units(shares[order])
        survivors = np.zeros_like(shares)
        survivors[order] = shares[order]
        total = int(masses.sum()) if truncation.top_k > 0 else mass_of_all(survivors)
        order = order[np.cumsum(masses) - masses < mass_needed(total, truncation.top_p)]
    kept = np.zeros(len(weights), dtype=np.bool_)
    kept[order] = True
    return kept


def mass_needed(total: int, top_p: float) -> int:
    """Returns the mass that the nucleus must reach, from 1 to `total`."""
    return min(math.ceil(top_p * float(total)), total)
