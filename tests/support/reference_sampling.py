"""Sampling as it is defined, in plain numpy: processors and noise that the compiled loops of the engine must repeat.

Order, meaning and arithmetic are those of `paceline.core.processors` and `paceline.core.noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.grammar import Allowed
from paceline.core.noise import exact_exp, exact_log, philox4x32, split_uint64
from paceline.core.params import SamplingParams
from paceline.core.processors import (
    Truncation,
    barred,
    ends_of_bad_words,
    masked_until_min_tokens,
    require_usable,
)

FloatArray = npt.NDArray[np.float64]

MASS_FLOOR = -700.0
_MASS_SCALE = 2.0**42
_TWO_52 = 2.0**52
_TWO_52_BITS = np.uint64(0x4330000000000000)


def noise_words(seed: int, position: int, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Returns one 32-bit random word per token id, shape of `token_ids`.

    Key = seed (low, high); counter = (token_id // 4, position low, position high, domain 0), word token_id
    % 4.
    """
    ids = np.asarray(token_ids, dtype=np.uint64)
    position_low, position_high = split_uint64(position)
    seed_low, seed_high = split_uint64(seed)
    block = philox4x32(ids >> np.uint64(2), position_low, position_high, np.uint64(0), seed_low, seed_high)
    words: npt.NDArray[np.uint64] = np.choose((ids & np.uint64(3)).astype(np.intp), block)
    return words


def gumbel(seed: int, position: int, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Returns a standard Gumbel variate per token id, float64, shape of `token_ids`.

    -log(-log(u)) with u = (word + 0.5) * 2**-32, which float64 holds exactly. `seed` is a uint64, `position`
    the absolute position that the token will take in its sequence, prompt included.
    """
    uniform = (noise_words(seed, position, token_ids).astype(np.float64) + 0.5) * 2.0**-32
    variates: npt.NDArray[np.float64] = -exact_log(-exact_log(uniform))
    return variates


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHistory:
    """The prefix that a row's processors see, and what the request's grammar, if it has one, lets follow it."""

    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()
    allowed: Allowed | None = None


def fixed_point_mass(log_ratio: Any) -> Any:
    """Returns exp(log_ratio) in units of 2**-42 as uint64, rounded to nearest; log_ratio lies in [-700, 0].

    Integers add up to the same total in any order. A vocabulary may hold 2**21 ids before a total leaves
    int64.
    """
    shifted = exact_exp(log_ratio) * _MASS_SCALE + _TWO_52
    return np.float64(shifted).view(np.uint64) - _TWO_52_BITS


def process(logits: npt.NDArray[np.float32], params: SamplingParams, history: RowHistory) -> FloatArray:
    """Returns log weights [vocab], float64, up to a constant; -inf for ids that the request rules out.

    At temperature 0 these are the biased and penalised logits.

    Raises:
        UnusableLogitsError: The logits hold NaN or +inf, or nothing is left to choose.
    """
    weights = _penalised(_biased(np.asarray(logits, dtype=np.float64), params, history), params, history)
    truncation = Truncation.of(params)
    weights = weights * truncation.inverse_temperature
    require_usable(float(weights.max()))
    return np.where(_kept(weights, truncation), weights, -np.inf)


def _biased(weights: FloatArray, params: SamplingParams, history: RowHistory) -> FloatArray:
    weights = weights.copy()
    for token_id, bias in params.logit_bias:
        weights[token_id] += bias
    weights[barred(params, len(weights))] = -np.inf
    weights[ends_of_bad_words(params.bad_words, history.output_token_ids)] = -np.inf
    if history.allowed is not None:
        weights[np.unpackbits(history.allowed.bits, bitorder="little")[: len(weights)] == 0] = -np.inf
    ended = history.allowed is not None and history.allowed.ended
    if len(history.output_token_ids) < params.min_tokens and not ended:
        weights[list(masked_until_min_tokens(params, history.eos_token_ids))] = -np.inf
    return weights


def _penalised(weights: FloatArray, params: SamplingParams, history: RowHistory) -> FloatArray:
    outputs = np.asarray(history.output_token_ids, dtype=np.intp)
    prompt = np.asarray(history.prompt_token_ids, dtype=np.intp)
    counts = np.bincount(outputs, minlength=len(weights)).astype(np.float64)
    seen = (counts > 0) | (np.bincount(prompt, minlength=len(weights)) > 0)
    penalty = params.repetition_penalty
    repeated = np.where(weights > 0.0, weights / penalty, weights * penalty)
    weights = np.where(seen, repeated, weights)
    weights = weights - params.frequency_penalty * counts
    return np.where(counts > 0, weights - params.presence_penalty, weights)


def _kept(weights: FloatArray, truncation: Truncation) -> npt.NDArray[np.bool_]:
    """Which ids survive all filters: a head of the order (largest weight first, lowest id among equals)."""
    order = np.argsort(-weights, kind="stable")
    largest = weights[order[0]]
    order = order[weights[order] >= max(largest + truncation.log_min_p, -np.finfo(np.float64).max)]
    if truncation.top_k > 0:
        order = order[: truncation.top_k]
    if truncation.top_p < 1.0:
        masses = fixed_point_mass(np.maximum(weights[order] - largest, MASS_FLOOR)).astype(np.int64)
        before = np.cumsum(masses) - masses
        order = order[before < mass_needed(int(masses.sum()), truncation.top_p)]
    kept = np.zeros(len(weights), dtype=np.bool_)
    kept[order] = True
    return kept


def mass_needed(total: int, top_p: float) -> int:
    """Returns the mass that the nucleus must reach, from 1 to `total`."""
    return min(math.ceil(top_p * float(total)), total)
