"""Guesses of a simulated drafter, and whether they are right: drawn from a distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.core.calibration import GREEDY_SHARPNESS, NUM_RANKED
from paceline.forest.tree_loops import MAX_MARGIN, margin
from paceline.service.config import setting
from paceline.simulated.text import Ints

# Places drawn from a distribution, and guesses at each.
NUM_DRAWN, NUM_GUESSES = 7680, 2
# A guess without any confidence, for its logarithm.
LEAST = 1e-12

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class GuessLaw:
    """Two guesses a place from a distribution, a function of the seed alone."""

    slope: float = setting(1.3, help="True log odds of a match per log odds of confidence.")
    intercept: float = setting(-0.2, help="True log odds of a match at even confidence.")
    confidence_mean: float = setting(1.6, help="Mean log odds that the drafter gives its first guess.")
    confidence_spread: float = setting(1.8, help="Their standard deviation.", low=0)
    second_low: float = setting(0.3, help="Least share of the rest that the second guess gets.", low=0, high=1)
    second_high: float = setting(0.9, help="Its largest share.", low=0, high=1)
    seed: int = setting(0, help="Of everything.")

    @classmethod
    def at(cls, chance: float) -> GuessLaw:
        """The first guess is right with one chance everywhere, and as confident as that; the second is less likely."""
        share = 0.5 * min(1.0, chance / max(1.0 - chance, LEAST))
        return cls(
            slope=1.0,
            intercept=0.0,
            confidence_mean=margin(chance),
            confidence_spread=0.0,
            second_low=share,
            second_high=share,
        )

    def drawn(self) -> tuple[Ints, Floats]:
        """Which guess is right, int64 [places], -1: none; confidences, best first, float64 [places, guesses]."""
        random = np.random.default_rng(self.seed)
        first = _sigmoid(random.normal(self.confidence_mean, self.confidence_spread, NUM_DRAWN))
        second = (1.0 - first) * random.uniform(self.second_low, self.second_high, NUM_DRAWN)
        draws = random.random(NUM_DRAWN)
        right_first = self._chances(first)
        right_second = np.minimum(1.0 - right_first, self._chances(second))
        ranks = np.where(draws < right_first, 0, np.where(draws < right_first + right_second, 1, -1))
        return ranks, np.stack([first, second], axis=1)

    def table(self, vocab_size: int) -> tuple[Ints, Logits, Logits]:
        """The places drawn, as logits whose confidences come out as drawn.

        Returns:
            Which guess is right, int64 [places], -1: none; logits of the guesses, best first, float32
            [places, guesses]; logit of each of the tokens beside them, float32 [places].
        """
        ranks, confidences = self.drawn()
        # `confidences` sharpens and sums up the likeliest tokens, and a good many of the rest.
        beside = max(1, min(vocab_size, NUM_RANKED) - NUM_GUESSES)
        rest = np.maximum(1.0 - confidences.sum(axis=1), 1e-9) / beside
        logits, others = (
            (GREEDY_SHARPNESS * np.log(np.maximum(each, LEAST))).astype(np.float32) for each in (confidences, rest)
        )
        return ranks, logits, others

    def _chances(self, confidences: Floats) -> Floats:
        """True probabilities that guesses match, if their parents do."""
        with np.errstate(divide="ignore"):
            odds = np.log(confidences) - np.log1p(-confidences)
        return _sigmoid(self.slope * np.clip(odds, -MAX_MARGIN, MAX_MARGIN) + self.intercept)


def _sigmoid(log_odds: Floats) -> Floats:
    chances: Floats = 1.0 / (1.0 + np.exp(-log_odds))
    return chances
