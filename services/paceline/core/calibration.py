"""How sure a drafter may be of its guesses, and which calibration judges which source."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from paceline.forest import UNLEARNED, Bools, Floats, Forest

# Sources whose calibration an engine keeps; addresses of drafters come and go.
MAX_CALIBRATIONS = 256
# Slopes, intercepts and variances beyond these are not learned from guesses, whose log odds are bounded.
MOST_LEARNED = 1e4

Key = TypeVar("Key", bound=Hashable)


class CalibrationStore(Generic[Key]):
    """The calibrations of an engine; its sessions share them.

    Args:
        kind_of: From a key to the kind that a calibration is kept as for a successor, which has other keys.
    """

    def __init__(self, forest: Forest, kind_of: Callable[[Key], str]) -> None:
        self._forest = forest
        self._kind_of = kind_of
        self._known: dict[Key, int] = {}
        # Learned from a predecessor, by kind.
        self._learned: dict[str, list[float]] = {}

    def of(self, key: Key) -> int:
        """The number of that of a key; a new one begins where a predecessor's of the same kind ended."""
        known = self._known.pop(key, None)
        if known is None:
            if len(self._known) < MAX_CALIBRATIONS:
                known = self._forest.new_calibration()
            else:
                # Drops the drafter that was paired longest ago; the rest of its sessions teaches another.
                known = self._known.pop(next(iter(self._known)))
            self._forest.set_calibration(known, self._learned.get(self._kind_of(key), UNLEARNED))
        self._known[key] = known
        return known

    def learned(self) -> dict[str, list[float]]:
        """By kind what was learned, of several the latest; may be called from another thread."""
        found = {self._kind_of(key): self._forest.calibration(number) for key, number in dict(self._known).items()}
        # A session of a warm-up has shown nothing.
        return {**self._learned, **{kind: each for kind, each in found.items() if each != [*UNLEARNED]}}

    def resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        """Begins with what a predecessor has learned, before the first session.

        Raises:
            TypeError, ValueError: It is not what `learned` returns.
        """
        for each in learned.values():
            check(each)
        self._learned = {kind: [*map(float, each)] for kind, each in learned.items()}


def check(learned: Sequence[float]) -> None:
    """Refuses what is no calibration: slope, intercept, and how sure they are.

    Raises:
        TypeError, ValueError: It is none.
    """
    slope, intercept, var_slope, var_intercept, covariance = map(float, learned)
    line = 0.0 < slope <= MOST_LEARNED and abs(intercept) <= MOST_LEARNED
    sure = 0.0 < var_slope <= MOST_LEARNED and 0.0 < var_intercept <= MOST_LEARNED
    if not (line and sure and abs(covariance) <= MOST_LEARNED and covariance**2 < var_slope * var_intercept):
        raise ValueError(f"no calibration: {learned}")


# Softmax temperatures of best likelihood on the demo pair (48 prompts of 96 tokens; mean confidence against match rate
# 0.73 and 0.73 greedy, 0.60 and 0.57 at temperature 0.8, 0.53 and 0.55 at 1).
GREEDY_SHARPNESS = 0.55
SAMPLED_SHARPNESS = 0.75
# Guesses that are ranked and share all confidence among them; those beyond have next to none once sharpened.
NUM_RANKED = 16
# Where no guess has a share.
LEAST_SUM = 1e-300
# Confidence of a guess judged by its sampling distribution. The number verified of a chain must not depend on
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
