"""From the target's logits to log weights: what sampling parameters mean, for every implementation.

Order and meaning are vLLM's: logit bias, allowed tokens, bad words, grammar, minimum tokens, repetition, frequency and
presence penalty, temperature, min-p, top-k, top-p; ties go to the lowest id (vLLM keeps all of them). Arithmetic, so
that two implementations agree bit by bit:

* Biases and penalties are computed in float64 and rounded to the float32 that logits are.
* Temperature multiplies by 1 / temperature in float64; min-p compares log weights.
* Top-p adds integer masses (`share` in units of 1 / `MASS_SCALE`), so that no sum depends on its order. Without top-k
  they are compared to the mass of all ids, which is added up in float32 for each `paceline.core.noise.BLOCK` of them,
  upper halves onto lower ones.

The compiled loops are in `paceline.engine`, the readable reference in `tests/support/reference_sampling.py`. Nothing
here knows noise, models or sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.errors import InvalidRequestError, PacelineError
from paceline.core.grammar import Bits
from paceline.core.noise import exact_log
from paceline.core.params import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

MAX_VOCAB_SIZE = 2**21
"""More ids, and a total of integer masses might leave int64."""

MASS_SCALE = 2.0**42
# `share` of less leaves float32's normal numbers.
LEAST_RATIO = np.float32(-87.0)

_LOG2_E, _ROUND = np.float32(1.44269504), np.float32(1.5 * 2**23)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_C2, _C3, _C4 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_C5, _C6, _C7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)
_ONE, _MANTISSA_BITS = np.float32(1.0), np.int32(23)


def share(log_ratio: Any) -> Any:
    """Returns the exponential of float32 values in [`LEAST_RATIO`, 0], about 1 ulp off, in float32.

    log_ratio = k * log(2) + r with |r| <= log(2) / 2, then Cephes' polynomial, and k added to its exponent. Built from
    IEEE 754 operations in a fixed order, for arrays as well as scalars, as `paceline.core.noise.exact_exp` is.
    """
    shifted = log_ratio * _LOG2_E + _ROUND
    k = shifted - _ROUND
    r = (log_ratio - k * _LN2_HIGH) - k * _LN2_LOW
    tail = _C2 + r * (_C3 + r * (_C4 + r * (_C5 + r * (_C6 + r * _C7))))
    power = _ONE + (r + (r * r) * tail)
    bits = np.float32(power).view(np.int32) + (np.float32(shifted).view(np.int32) << _MANTISSA_BITS)
    return np.int32(bits).view(np.float32)


class UnusableLogitsError(PacelineError, ArithmeticError):
    """A row of logits leaves no token to choose: it holds NaN or +inf, or every id is masked."""


class NoTokenLeftError(InvalidRequestError, UnusableLogitsError):
    """What a request asks for leaves no token to choose at some place of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Temperature and filters as numbers that every implementation uses as they are.

    By default filters are off. Greedy rows have none, for none of them could change the argmax.
    """

    greedy: bool = True
    inverse_temperature: float = 1.0
    log_min_p: float = -math.inf
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, params: SamplingParams) -> Truncation:
        """Returns the numbers of one request."""
        if params.temperature < GREEDY_BELOW:
            return cls()
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


def allowed_bits(params: SamplingParams, vocab_size: int) -> Bits:
    """Returns those of `allowed_token_ids`, a bit an id; empty where all are allowed."""
    if not params.allowed_token_ids:
        return np.empty(0, np.uint8)
    # Not as a list of all others: at 150,000 ids one took a quarter of a second to make, and 2 MB.
    bits, ids = np.zeros(-(-vocab_size // 8), np.uint8), np.array(params.allowed_token_ids)
    np.bitwise_or.at(bits, ids >> 3, np.left_shift(1, ids & 7).astype(np.uint8))
    return bits


def ends_of_bad_words(bad_words: Sequence[tuple[int, ...]], output_token_ids: Sequence[int]) -> list[int]:
    """Returns the last tokens of the bad words whose other tokens the output ends with; of those of one token always.

    Args:
        bad_words: Token ids of each.
        output_token_ids: The whole output, or as many of its last tokens as the longest bad word has but one.
    """
    outputs = tuple(output_token_ids)
    return [word[-1] for word in bad_words if outputs[max(0, len(outputs) - len(word) + 1) :] == word[:-1]]


def require_usable(largest: float) -> None:
    """Refuses a row by its largest log weight, NaN if any of them is.

    Raises:
        UnusableLogitsError: It is not finite.
    """
    if not math.isfinite(largest):
        reason = "every token is masked" if largest == -math.inf else f"the largest is {largest}"
        raise UnusableLogitsError(f"cannot choose a token from these logits: {reason}")
