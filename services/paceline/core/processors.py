"""From the target's logits to log weights: the reference for the compiled loops of `paceline.engine`.

Order and meaning are vLLM's: logit bias, allowed tokens, bad words, grammar, minimum tokens, repetition, frequency and
presence penalty, temperature, min-p, top-k, top-p; ties go to the lowest id (vLLM keeps all of them). Arithmetic, so
that a compiled loop can repeat it bit by bit: logits are widened to float64 and stay there; temperature multiplies
by 1 / temperature; min-p compares log weights; top-p adds integer masses (see `fixed_point_mass`), so no
sum depends on its order. Nothing here knows noise, models or sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.core.errors import InvalidRequestError, PacelineError
from paceline.core.grammar import Allowed
from paceline.core.noise import exact_exp, exact_log
from paceline.core.params import SamplingParams

FloatArray = npt.NDArray[np.float64]

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

MASS_FLOOR = -700.0
MAX_VOCAB_SIZE = 2**21
_MASS_SCALE = 2.0**42
_TWO_52 = 2.0**52
_TWO_52_BITS = np.uint64(0x4330000000000000)


class UnusableLogitsError(PacelineError, ArithmeticError):
    """A row of logits leaves no token to choose: it holds NaN or +inf, or every id is masked."""


class NoTokenLeftError(InvalidRequestError, UnusableLogitsError):
    """What a request asks for leaves no token to choose at some place of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowHistory:
    """The prefix that a row's processors see, and what the request's grammar, if it has one, lets follow it."""

    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()
    allowed: Allowed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Temperature and filters as numbers that both implementations use as they are.

    `log_min_p` is -inf, `top_k` 0 and `top_p` 1.0 where the filter is off; greedy rows have no filters, for
    none of them could change the argmax.
    """

    greedy: bool
    inverse_temperature: float
    log_min_p: float
    top_k: int
    top_p: float

    @classmethod
    def of(cls, params: SamplingParams) -> Truncation:
        """Returns the numbers of one request."""
        if params.temperature < GREEDY_BELOW:
            return cls(greedy=True, inverse_temperature=1.0, log_min_p=-math.inf, top_k=0, top_p=1.0)
        return cls(
            greedy=False,
            inverse_temperature=1.0 / params.temperature,
            log_min_p=_log_or_off(params.min_p),
            top_k=params.top_k,
            top_p=params.top_p,
        )


def _log_or_off(min_p: float) -> float:
    return float(exact_log(min_p)) if min_p > 1e-300 else -math.inf


def masked_until_min_tokens(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """Returns the ids barred until `min_tokens` outputs: stop tokens and end-of-text, ascending."""
    return tuple(sorted({*params.stop_token_ids, *eos_token_ids})) if params.min_tokens else ()


def barred(params: SamplingParams, vocab_size: int) -> npt.NDArray[np.int64]:
    """Returns the ids beside those of `allowed_token_ids`, ascending; none where all are allowed."""
    if not params.allowed_token_ids:
        return np.empty(0, np.int64)
    ids: npt.NDArray[np.int64] = np.setdiff1d(np.arange(vocab_size), params.allowed_token_ids)
    return ids


def ends_of_bad_words(bad_words: Sequence[tuple[int, ...]], output_token_ids: Sequence[int]) -> list[int]:
    """Returns the last tokens of the bad words whose other tokens the output ends with; of those of one token always.

    Args:
        bad_words: Token ids of each.
        output_token_ids: The whole output, or as many of its last tokens as the longest bad word has but one.
    """
    outputs = tuple(output_token_ids)
    return [word[-1] for word in bad_words if outputs[max(0, len(outputs) - len(word) + 1) :] == word[:-1]]


def fixed_point_mass(log_ratio: Any) -> Any:
    """Returns exp(log_ratio) in units of 2**-42 as uint64, rounded to nearest, for log_ratio in [-700, 0].

    Integers add up to the same total in any order. A vocabulary may hold 2**21 ids before a total leaves
    int64. `paceline.engine` has its own copy of these two lines, for compiled code cannot call this one.
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


def require_usable(largest: float) -> None:
    """Refuses a row by its largest log weight, NaN if any of them is.

    Raises:
        UnusableLogitsError: It is not finite.
    """
    if not math.isfinite(largest):
        reason = "every token is masked" if largest == -math.inf else f"the largest is {largest}"
        raise UnusableLogitsError(f"cannot choose a token from these logits: {reason}")


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
