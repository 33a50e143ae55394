"""From a source's confidence in a guess to the probability that the target agrees, learned online.

The margin of a guess is the log odds of its confidence: its score against all its rivals. Per source,

    P(match) = sigmoid(slope * margin + intercept + offset of the session),

fitted by recursive logistic regression (one Newton step per observation, with forgetting). Only guesses whose parent
was committed are observed: there the target's own token is known, verified or not. Guesses further down were never
reached and teach nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

# Odds beyond these are not believed: no guess is sure, none impossible.
MAX_MARGIN = 6.0
# Start: the drafter is believed, and this uncertain; and how fast old observations lose weight.
SLOPE_VARIANCE, INTERCEPT_VARIANCE, OFFSET_VARIANCE = 0.25, 0.5, 0.3
DRIFT = 2e-5
OFFSET_DRIFT = 2e-3
LEAST_SLOPE = 0.1
# Sources whose calibration an engine keeps; addresses of drafters come and go.
MAX_CALIBRATIONS = 256

Key = TypeVar("Key", bound=Hashable)


# On the wire a confidence is one byte.
@lru_cache(maxsize=1024)
def margin(confidence: float) -> float:
    """Log odds, bounded."""
    if confidence <= 0.0:
        return -MAX_MARGIN
    if confidence >= 1.0:
        return MAX_MARGIN
    return max(-MAX_MARGIN, min(MAX_MARGIN, math.log(confidence / (1.0 - confidence))))


@dataclass(slots=True)
class SessionOffset:
    """How much better (or worse) than usual a source does on one session, in log odds."""

    value: float = 0.0
    variance: float = OFFSET_VARIANCE


class Calibration:
    """One source's map from confidence to probability; see the module docstring."""

    def __init__(self) -> None:
        self.slope = 1.0
        self.intercept = 0.0
        self._var_slope = SLOPE_VARIANCE
        self._var_intercept = INTERCEPT_VARIANCE
        self._covariance = 0.0

    def learned(self) -> list[float]:
        """Slope, intercept and how sure they are; see `resume`."""
        return [self.slope, self.intercept, self._var_slope, self._var_intercept, self._covariance]

    def resume(self, learned: Sequence[float]) -> None:
        """Begins with what a predecessor has learned.

        Raises:
            ValueError: It is not what `learned` returns.
        """
        slope, intercept, var_slope, var_intercept, covariance = map(float, learned)
        if not (math.isfinite(slope + intercept) and covariance**2 < var_slope * var_intercept < math.inf):
            raise ValueError(f"no calibration: {learned}")
        self.slope, self.intercept = max(LEAST_SLOPE, slope), intercept
        self._var_slope, self._var_intercept, self._covariance = var_slope, var_intercept, covariance

    def probability(self, confidence: float, offset: SessionOffset) -> float:
        """Probability that the target chooses a guess, given that it gets there."""
        return _sigmoid(self.slope * margin(confidence) + self.intercept + offset.value)

    def observe(self, confidence: float, offset: SessionOffset, *, matched: float) -> None:
        """Learns from one guess below a committed token: it matched, 1, or did not, 0, or would with a probability."""
        x = margin(confidence)
        chance = _sigmoid(self.slope * x + self.intercept + offset.value)
        curvature = chance * (1.0 - chance)
        toward_slope = self._var_slope * x + self._covariance
        toward_intercept = self._covariance * x + self._var_intercept
        spread = x * toward_slope + toward_intercept + offset.variance
        scale = 1.0 / (1.0 + curvature * spread)
        error = (matched - chance) * scale
        self.slope = max(LEAST_SLOPE, self.slope + toward_slope * error)
        self.intercept += toward_intercept * error
        offset.value += offset.variance * error
        shrink = curvature * scale
        self._var_slope += DRIFT - shrink * toward_slope**2
        self._covariance -= shrink * toward_slope * toward_intercept
        self._var_intercept += DRIFT - shrink * toward_intercept**2
        offset.variance = min(OFFSET_VARIANCE, offset.variance + OFFSET_DRIFT - shrink * offset.variance**2)


class Calibrations:
    """Those of all sources as one session sees them, with offsets of its own.

    Args:
        known: By source; any other source starts unknown.
    """

    def __init__(self, known: Mapping[str, Calibration] | None = None) -> None:
        self._sources = {name: (calibration, SessionOffset()) for name, calibration in (known or {}).items()}

    def probability(self, source: str, confidence: float) -> float:
        """Probability that the target chooses a source's guess, given that it gets there."""
        calibration, offset = self._of(source)
        return calibration.probability(confidence, offset)

    def observe(self, source: str, confidence: float, *, matched: float) -> None:
        """Learns from one guess of a source below a committed token."""
        calibration, offset = self._of(source)
        calibration.observe(confidence, offset, matched=matched)

    def _of(self, source: str) -> tuple[Calibration, SessionOffset]:
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = (Calibration(), SessionOffset())
        return known


class CalibrationStore(Generic[Key]):
    """The calibrations of an engine; its sessions share them.

    Args:
        kind_of: From a key to the kind that a calibration is kept as for a successor, which has other keys.
    """

    def __init__(self, kind_of: Callable[[Key], str]) -> None:
        self._kind_of = kind_of
        self._known: dict[Key, Calibration] = {}
        # Of a predecessor, by kind.
        self._learned: Mapping[str, Sequence[float]] = {}

    def of(self, key: Key) -> Calibration:
        """That of a key; a new one begins where a predecessor's of the same kind ended."""
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_CALIBRATIONS:
                self._known.pop(next(iter(self._known)))
            known = self._known[key] = Calibration()
            if (kind := self._kind_of(key)) in self._learned:
                known.resume(self._learned[kind])
        return known

    def learned(self) -> dict[str, list[float]]:
        """By kind what was learned, of several the latest; may be called from another thread."""
        return {self._kind_of(key): calibration.learned() for key, calibration in dict(self._known).items()}

    def resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        """Begins with what a predecessor has learned, before the first session.

        Raises:
            TypeError, ValueError: It is not what `learned` returns.
        """
        for each in learned.values():
            Calibration().resume(each)
        self._learned = dict(learned)


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
