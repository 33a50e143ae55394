"""From the target's logits to log weights: what sampling parameters mean, for every implementation.

Order and meaning are vLLM's: logit bias, allowed tokens, bad words, grammar, minimum tokens, repetition, frequency and
presence penalty, temperature, min-p, top-k, top-p; ties go to the lowest id (vLLM keeps all of them). Arithmetic, so
that two implementations agree bit by bit: logits are widened to float64 and stay there; temperature multiplies
by 1 / temperature; min-p compares log weights; top-p adds integer masses (exp in units of 2**-42), so no
sum depends on its order. The compiled loops are in `paceline.engine`, the readable reference in
`tests/support/reference_sampling.py`. Nothing here knows noise, models or sessions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.errors import InvalidRequestError, PacelineError
from paceline.core.noise import exact_log
from paceline.core.params import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

MAX_VOCAB_SIZE = 2**21
"""More ids, and a total of integer masses might leave int64."""


class UnusableLogitsError(PacelineError, ArithmeticError):
    """A row of logits leaves no token to choose: it holds NaN or +inf, or every id is masked."""


class NoTokenLeftError(InvalidRequestError, UnusableLogitsError):
    """What a request asks for leaves no token to choose at some place of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truncation:
    """Temperature and filters as numbers that every implementation uses as they are.

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


def require_usable(largest: float) -> None:
    """Refuses a row by its largest log weight, NaN if any of them is.

    Raises:
        UnusableLogitsError: It is not finite.
    """
    if not math.isfinite(largest):
        reason = "every token is masked" if largest == -math.inf else f"the largest is {largest}"
        raise UnusableLogitsError(f"cannot choose a token from these logits: {reason}")
