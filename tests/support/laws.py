"""The rules of acceptance in closed form."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.core.acceptance import SparseDraft

FloatArray = npt.NDArray[np.float64]


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
