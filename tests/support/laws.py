"""What the rules of acceptance must amount to, in closed form, and chains that the compiled rule is walked down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.acceptance import SparseDraft
from paceline.engine.backends.cpu import step_kernels

FloatArray = npt.NDArray[np.float64]
_NOTHING_DRAWN = (np.zeros(0, np.int64), np.zeros(0))


def coupled_choice(log_weights: FloatArray, noise: FloatArray | None) -> int:
    """Returns the coupled rule's token: the argmax of log weights plus noise, the lowest id among equals.

    With Gumbel noise an exact sample of softmax(log_weights) (Gumbel-max), without noise the greedy choice.

    Args:
        log_weights: [vocab], log probabilities up to a constant, -inf for masked ids.
        noise: [vocab], or None at temperature 0.
    """
    return int(np.argmax(log_weights if noise is None else log_weights + noise))


def overlap(target_probs: FloatArray, draft_probs: FloatArray) -> float:
    """Returns the probability that a token drawn from `draft_probs` is accepted by the rejection rule: 1 - TV.

    2211.17192, theorem 3.5; what a row shows of its drafter, whatever token was drawn.
    """
    return float(np.minimum(target_probs, draft_probs).sum())


def dense(draft: SparseDraft, vocab_size: int) -> FloatArray:
    """Returns the distribution over the whole vocabulary, [vocab_size]."""
    probs = np.zeros(vocab_size)
    probs[list(draft.token_ids)] = np.array(draft.weights, dtype=np.float64) / sum(draft.weights)
    return probs


def pick(probs: FloatArray, uniform: float) -> int:
    """Returns the token that the compiled rule draws where there is no guess."""
    token_id, _ = step_kernels.accept(probs.copy(), *_NOTHING_DRAWN, step_kernels.NOTHING, np.array([0.0, uniform]))
    return token_id


class VerifyOutcome(NamedTuple):
    """How many draft tokens were accepted, and the one token that follows them."""

    num_accepted: int
    next_token_id: int


def reject_walk(
    target_rows: Sequence[FloatArray],
    draft_rows: Sequence[FloatArray],
    draft_tokens: Sequence[int],
    uniforms: Sequence[float],
) -> VerifyOutcome:
    """Verifies a chain of draft tokens by the compiled rule.

    Args:
        target_rows: gamma + 1 rows [vocab]; row i is the target's distribution after the first i draft tokens.
        draft_rows: gamma rows [vocab]; row i is the distribution that `draft_tokens[i]` was sampled from.
        draft_tokens: gamma token ids.
        uniforms: gamma + 1 fresh numbers in [0, 1): one per draft token, the last for the token that follows.
    """
    for index, (target, draft, token_id) in enumerate(zip(target_rows, draft_rows, draft_tokens, strict=False)):
        drawn_from, numbers = (np.arange(len(draft)), draft), np.array([uniforms[index], uniforms[-1]])
        found, chance = step_kernels.accept(target.copy(), *drawn_from, token_id, numbers)
        assert abs(chance - overlap(target, draft)) < 1e-12
        if found != token_id:
            return VerifyOutcome(index, found)
    return VerifyOutcome(len(draft_tokens), pick(target_rows[-1], uniforms[-1]))
