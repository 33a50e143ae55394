"""Which calibration judges which source's guesses; `paceline.forest.calibrating` is what they compute."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from paceline.forest import UNLEARNED, Forest

# Sources whose calibration an engine keeps; addresses of drafters come and go.
MAX_CALIBRATIONS = 256

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
        # Of a predecessor, by kind.
        self._learned: Mapping[str, Sequence[float]] = {}

    def of(self, key: Key) -> int:
        """The number of that of a key; a new one begins where a predecessor's of the same kind ended."""
        known = self._known.pop(key, None)
        if known is None:
            if len(self._known) < MAX_CALIBRATIONS:
                known = self._forest.new_calibration()
            else:
                # That of the drafter that was paired longest ago; what is left of its sessions teaches another.
                known = self._known.pop(next(iter(self._known)))
            self._forest.set_calibration(known, self._learned.get(self._kind_of(key), UNLEARNED))
        self._known[key] = known
        return known

    def learned(self) -> dict[str, list[float]]:
        """By kind what was learned, of several the latest; may be called from another thread."""
        return {self._kind_of(key): self._forest.calibration(number) for key, number in dict(self._known).items()}

    def resume(self, learned: Mapping[str, Sequence[float]]) -> None:
        """Begins with what a predecessor has learned, before the first session.

        Raises:
            TypeError, ValueError: It is not what `learned` returns.
        """
        for each in learned.values():
            check(each)
        self._learned = dict(learned)


def check(learned: Sequence[float]) -> None:
    """Refuses what is no calibration: slope, intercept, and how sure they are.

    Raises:
        TypeError, ValueError: It is none.
    """
    slope, intercept, var_slope, var_intercept, covariance = map(float, learned)
    if not (math.isfinite(slope + intercept) and covariance**2 < var_slope * var_intercept < math.inf):
        raise ValueError(f"no calibration: {learned}")
