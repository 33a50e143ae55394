"""How sure a drafter may be of a guess: shares of the draft distribution, sharpened to match what really happens.

A draft model trained on the target's probabilities gives the likeliest token its probability, but what counts is
whether the target *chooses* it. Greedy targets choose the likeliest token far more often than its probability says,
and coupled sampling chooses the best perturbed score more often than that score's share. So shares are raised to a
power and renormalised, which is a softmax of lower temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

# Softmax temperatures of best likelihood on the demo pair (48 prompts of 96 tokens; mean confidence against match rate
# 0.73 and 0.73 greedy, 0.60 and 0.57 at temperature 0.8, 0.53 and 0.55 at 1).
GREEDY_SHARPNESS = 0.55
SAMPLED_SHARPNESS = 0.75
# Guesses ranked for the sake of the sum; those beyond have next to no share once sharpened.
NUM_RANKED = 16
# Of a guess that is judged by the distribution it was sampled from. How many of a chain are verified must not depend on
# which tokens were drawn, so all are equally sure; what that is worth, calibration learns.
CHAIN_CONFIDENCE = 0.75


def confidences(shares: Sequence[float], *, greedy: bool) -> list[float]:
    """Sharpens the shares of the best guesses, best first; they sum to 1.

    Args:
        shares: Softmax shares of the (perturbed) draft scores, the `NUM_RANKED` best.
        greedy: Whether the target chooses without noise.
    """
    power = 1.0 / (GREEDY_SHARPNESS if greedy else SAMPLED_SHARPNESS)
    powers = [share**power for share in shares]
    total = sum(powers)
    return [value / total for value in powers] if total > 0 else [0.0] * len(powers)
