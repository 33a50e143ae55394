"""How sure a drafter may be of a guess: shares of the draft distribution, sharpened to match what really happens.

A draft model trained on the target's probabilities gives the likeliest token its probability, but what counts is
whether the target *chooses* it. Greedy targets choose the likeliest token far more often than its probability says,
and coupled sampling chooses the best perturbed score more often than that score's share. So shares are raised to a
power and renormalised, which is a softmax of lower temperature.
"""

from __future__ import annotations

import numpy as np

from paceline.forest import Bools, Floats

# Softmax temperatures of best likelihood on the demo pair (48 prompts of 96 tokens; mean confidence against match rate
# 0.73 and 0.73 greedy, 0.60 and 0.57 at temperature 0.8, 0.53 and 0.55 at 1).
GREEDY_SHARPNESS = 0.55
SAMPLED_SHARPNESS = 0.75
# Guesses that are ranked and share all confidence among them; those beyond have next to none once sharpened.
NUM_RANKED = 16
# Where no guess has a share.
LEAST_SUM = 1e-300
# Of a guess that is judged by the distribution it was sampled from. How many of a chain are verified must not depend on
# which tokens were drawn, so all are equally sure; what that is worth, calibration learns.
CHAIN_CONFIDENCE = 0.75


def confidences(weights: Floats, *, greedy: bool | Bools) -> Floats:
    """Sharpens the shares of the best guesses, best first; those of a row sum to 1, or are all 0.

    Args:
        weights: Shares of the `NUM_RANKED` best of the softmax of the (perturbed) draft scores, up to a factor for
            each row, `[..., NUM_RANKED]`.
        greedy: Whether the target chooses without noise, `[...]`.
    """
    powers = weights ** (1.0 / np.where(greedy, GREEDY_SHARPNESS, SAMPLED_SHARPNESS))[..., None]
    sharpened: Floats = powers / np.maximum(powers.sum(axis=-1, keepdims=True), LEAST_SUM)
    return sharpened
