"""What a drafter guesses and whether it is right: drawn from a law, or recorded from real texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.errors import ConfigError
from paceline.forest.tree_loops import margin
from paceline.service.config import setting

# Places drawn from a law.
NUM_DRAWN = 7680
# The second guess has this share of what the first one leaves, from and to.
SECOND = (0.3, 0.9)

Chances = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnGuesses:
    """Two guesses a place from a law, a function of the seed alone."""

    slope: float = setting(1.3, help="True log odds of a match per log odds of confidence.")
    intercept: float = setting(-0.2, help="True log odds of a match at even confidence.")
    confidence_mean: float = setting(1.6, help="Mean log odds that the drafter gives its first guess.")
    confidence_spread: float = setting(1.8, help="Their standard deviation.", low=0)
    seed: int = setting(0, help="Of everything.")

    def chance(self, confidence: float) -> float:
        """True probability that a guess of this confidence matches, if its parent does."""
        return float(_sigmoid(self.slope * margin(confidence) + self.intercept))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlace:
    """One position of a real text.

    Args:
        rank: Which of the guesses was the target's token, from 0; None: none of them.
        confidences: How sure the drafter was of each, best first.
    """

    rank: int | None
    confidences: tuple[float, ...]


class RecordedGuesses:
    """Guesses of a drafter along texts.

    Args:
        texts: By generated token, from the first one.

    Raises:
        ConfigError: There is no text, or one is empty.
    """

    def __init__(self, texts: Sequence[Sequence[RecordedPlace]]) -> None:
        if not texts or not all(texts):
            raise ConfigError("acceptance.texts: needs at least one text, and none of them empty")
        self.texts = tuple(map(tuple, texts))


Guesses = DrawnGuesses | RecordedGuesses


@functools.cache
def drawn(law: DrawnGuesses) -> RecordedGuesses:
    """Places drawn from a law, once: a simulation reads millions of them."""
    chance = np.random.default_rng(law.seed)
    first = _sigmoid(chance.normal(law.confidence_mean, law.confidence_spread, NUM_DRAWN))
    second = (1.0 - first) * chance.uniform(*SECOND, NUM_DRAWN)
    draws = chance.random(NUM_DRAWN)
    places = list[RecordedPlace]()
    for sure, less, draw in zip(first.tolist(), second.tolist(), draws.tolist(), strict=True):
        right_first = law.chance(sure)
        right_second = min(1.0 - right_first, law.chance(less))
        rank = 0 if draw < right_first else 1 if draw < right_first + right_second else None
        places.append(RecordedPlace(rank=rank, confidences=(sure, less)))
    return RecordedGuesses([places])


def guesses_at(chance: float) -> RecordedGuesses:
    """Guesses of which the first is right with one chance everywhere, as confident as that."""
    second = min(chance, 1.0 - chance) / 2
    draws = np.random.default_rng(0).random(NUM_DRAWN)
    ranks = [0 if draw < chance else 1 if draw < chance + second else None for draw in draws]
    return RecordedGuesses([[RecordedPlace(rank=rank, confidences=(chance, second)) for rank in ranks]])


def _sigmoid(log_odds: float | Chances) -> Chances:
    return np.asarray(1.0 / (1.0 + np.exp(-np.asarray(log_odds))))
