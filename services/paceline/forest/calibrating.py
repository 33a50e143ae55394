"""From a source's confidence in a guess to the probability that the target agrees, learned online.

The margin of a guess is the log odds of its confidence: its score against all its rivals. Per source,

    P(match) = sigmoid(slope * margin + intercept + offset of the session),

fitted by recursive logistic regression (one Newton step per observation, with forgetting). Only guesses whose parent
was committed are observed: there the target's own token is known, verified or not. Guesses further down were never
reached and teach nothing.
"""

from __future__ import annotations

import math
from typing import Any

from paceline.forest.kernel import kernel
from paceline.forest.records import NONE

# Odds beyond these are not believed: no guess is sure, none impossible.
MAX_MARGIN = 6.0
# Start: a source is believed, and this uncertain; and how fast old observations lose weight.
SLOPE_VARIANCE, INTERCEPT_VARIANCE, OFFSET_VARIANCE = 0.25, 0.5, 0.3
DRIFT = 2e-5
OFFSET_DRIFT = 2e-3
LEAST_SLOPE = 0.1


@kernel
def margin(confidence: float) -> float:
    """Log odds, bounded."""
    if confidence <= 0.0:
        return -MAX_MARGIN
    if confidence >= 1.0:
        return MAX_MARGIN
    return max(-MAX_MARGIN, min(MAX_MARGIN, math.log(confidence / (1.0 - confidence))))


@kernel
def sigmoid(value: float) -> float:
    """From log odds to a probability."""
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0.0 else math.exp(value) / (1.0 + math.exp(value))


@kernel
def probability(judge: Any, calibrations: Any, confidence: float) -> float:
    """Probability that the target chooses a guess, given that it gets there."""
    if judge.calibration == NONE:
        return confidence
    known = calibrations[judge.calibration]
    return sigmoid(known.slope * margin(confidence) + known.intercept + judge.offset)


@kernel
def observe(judge: Any, calibrations: Any, confidence: float, matched: float) -> None:
    """Learns from one guess below a committed token: it matched, 1, or did not, 0, or would with a probability."""
    if judge.calibration == NONE:
        return
    known = calibrations[judge.calibration]
    x = margin(confidence)
    chance = sigmoid(known.slope * x + known.intercept + judge.offset)
    curvature = chance * (1.0 - chance)
    toward_slope = known.var_slope * x + known.covariance
    toward_intercept = known.covariance * x + known.var_intercept
    scale = 1.0 / (1.0 + curvature * (x * toward_slope + toward_intercept + judge.variance))
    error = (matched - chance) * scale
    known.slope = max(LEAST_SLOPE, known.slope + toward_slope * error)
    known.intercept += toward_intercept * error
    judge.offset += judge.variance * error
    shrink = curvature * scale
    known.var_slope += DRIFT - shrink * toward_slope**2
    known.covariance -= shrink * toward_slope * toward_intercept
    known.var_intercept += DRIFT - shrink * toward_intercept**2
    judge.variance = min(OFFSET_VARIANCE, judge.variance + OFFSET_DRIFT - shrink * judge.variance**2)
