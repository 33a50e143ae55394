"""What the rules of acceptance must amount to, in closed form."""

from __future__ import annotations

import numpy as np

from paceline.core.rejection_sampling import FloatArray


def coupled_choice(log_weights: FloatArray, noise: FloatArray | None) -> int:
    """Returns the coupled rule's token: the argmax of log weights plus noise, the lowest id among equals.

    With Gumbel noise an exact sample of softmax(log_weights) (Gumbel-max), without noise the greedy choice.

    Args:
        log_weights: [vocab], log probabilities up to a constant, -inf for masked ids.
        noise: [vocab], or None at temperature 0.
    """
    return int(np.argmax(log_weights if noise is None else log_weights + noise))


def coupled_match_prob(target_probs: FloatArray, draft_probs: FloatArray) -> float:
    """Returns the probability that drafter and target choose the same token under shared Gumbel noise.

    sum_i 1 / sum_j max(target_j / target_i, draft_j / draft_i), between (1 - TV) / (1 + TV) and 1 - TV
    (Daliri, Musco, Suresh 2408.07978).
    """
    both = np.flatnonzero((target_probs > 0.0) & (draft_probs > 0.0))
    ratios = [np.maximum(target_probs / target_probs[i], draft_probs / draft_probs[i]) for i in both]
    return float(sum(1.0 / ratio.sum() for ratio in ratios))


def accept_prob(target_probs: FloatArray, draft_probs: FloatArray, token_id: int) -> float:
    """Returns the probability that u * draft_prob < target_prob for u uniform in [0, 1)."""
    target_prob, draft_prob = float(target_probs[token_id]), float(draft_probs[token_id])
    if target_prob >= draft_prob:
        return 1.0 if target_prob > 0.0 else 0.0
    return target_prob / draft_prob
