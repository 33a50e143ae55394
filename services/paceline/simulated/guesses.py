"""What a drafter guesses and whether it is right: drawn from a law, or recorded from real texts.

The target's token is `RIGHT` at every position, so a guess matches when it is that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from paceline.core.errors import ConfigError
from paceline.forest.calibrating import margin
from paceline.service.config import setting

RIGHT = 0
# Positions of guesses off the true text lie this far apart from it.
STRIDE = 1 << 20
# Texts drawn from a law, and the tokens of each.
NUM_DRAWN, DRAWN_LENGTH = 48, 160

# `(token_id, confidence)`, best first.
Ranked = Sequence[tuple[int, float]]


class GuessSource(Protocol):
    """Whatever knows the drafter's guesses."""

    def guesses(self, session: int, position: int) -> Ranked:
        """The best guesses at a position of a session's text; off the true text it is `STRIDE` or more."""
        ...


# Without slots, so that properties can be kept.
@dataclass(frozen=True, kw_only=True)
class DrawnGuesses:
    """Two guesses a position from a law, a function of the seed alone."""

    slope: float = setting(1.3, help="True log odds of a match per log odds of confidence.")
    intercept: float = setting(-0.2, help="True log odds of a match at even confidence.")
    session_spread: float = setting(0.6, help="Standard deviation of the sessions' own log odds.", low=0)
    confidence_mean: float = setting(1.6, help="Mean log odds that the drafter gives its first guess.")
    confidence_spread: float = setting(1.8, help="Their standard deviation.", low=0)
    seed: int = setting(0, help="Of everything.")

    @cached_property
    def _offsets(self) -> dict[int, float]:
        return {}

    @cached_property
    def _guesses(self) -> dict[tuple[int, int], Ranked]:
        return {}

    def offset(self, session: int) -> float:
        """A session's own log odds."""
        if session not in self._offsets:
            drawn = float(philox(self.seed, 1, session, 0).standard_normal())
            self._offsets[session] = self.session_spread * drawn
        return self._offsets[session]

    def chance(self, confidence: float, session: int) -> float:
        """True probability that a guess of this confidence matches, if its parent does."""
        log_odds = self.slope * margin(confidence) + self.intercept + self.offset(session)
        return 1.0 / (1.0 + math.exp(-log_odds))

    def guesses(self, session: int, position: int) -> Ranked:
        """The best guesses at a position, drawn once."""
        key = (session, position)
        if key not in self._guesses:
            self._guesses[key] = self._guess(session, position)
        return self._guesses[key]

    def _guess(self, session: int, position: int) -> Ranked:
        rng = philox(self.seed, 2, session, position)
        first = float(1.0 / (1.0 + math.exp(-rng.normal(self.confidence_mean, self.confidence_spread))))
        second = (1.0 - first) * float(rng.uniform(0.3, 0.9))
        draw = float(rng.random())
        right_first = self.chance(first, session)
        right_second = min(1.0 - right_first, self.chance(second, session))
        if draw < right_first:
            return (RIGHT, first), (1, second)
        if draw < right_first + right_second:
            return (1, first), (RIGHT, second)
        return (1, first), (2, second)


@functools.cache
def texts_of(law: DrawnGuesses) -> RecordedGuesses:
    """Some texts by a law, drawn once: a simulation reads millions of places, and draws are expensive."""
    texts = [
        [_place(law.guesses(session, position)) for position in range(1, 1 + DRAWN_LENGTH)]
        for session in range(NUM_DRAWN)
    ]
    return RecordedGuesses(texts)


def _place(ranked: Ranked) -> RecordedPlace:
    tokens = [token_id for token_id, _ in ranked]
    rank = tokens.index(RIGHT) if RIGHT in tokens else None
    return RecordedPlace(rank=rank, confidences=tuple(sure for _, sure in ranked))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlace:
    """One position of a real text.

    Args:
        rank: Which of the guesses was the target's token, from 0; None: none of them.
        confidences: How sure the drafter was of each, best first.
    """

    rank: int | None
    confidences: tuple[float, ...]

    @property
    def guesses(self) -> Ranked:
        """The guesses, with tokens that stand for right and wrong."""
        return [(RIGHT if index == self.rank else 1 + index, sure) for index, sure in enumerate(self.confidences)]


class RecordedGuesses:
    """Guesses of a real drafter along real texts; session `n` has text `n` modulo their number, over and over.

    Off the true text nothing was recorded: there the drafter is as sure as at some other place.

    Args:
        texts: By generated token, from the first one.

    Raises:
        ConfigError: There is no text, or one is empty.
    """

    def __init__(self, texts: Sequence[Sequence[RecordedPlace]]) -> None:
        if not texts or not all(texts):
            raise ConfigError("acceptance.texts: needs at least one text, and none of them empty")
        self.texts = tuple(map(tuple, texts))
        self._guesses = [[place.guesses for place in text] for text in self.texts]

    def guesses(self, session: int, position: int) -> Ranked:
        """The best guesses at a position; position 0 is the prompt's last token."""
        if position >= STRIDE:
            session, position = session + position // STRIDE, position * 7919
        text = self._guesses[session % len(self._guesses)]
        return text[(position - 1) % len(text)]


def philox(*key: int) -> np.random.Generator:
    """Random numbers that are a function of the key alone."""
    return np.random.Generator(np.random.Philox(key=np.array([hash(key) & (2**63 - 1), 7], np.uint64)))
