"""What sources that compute logits inside the verifier have in common: a session, and guesses from a row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.confidence import NUM_RANKED, confidences
from paceline.core.processors import UnusableLogitsError
from paceline.engine.source_interface import Followed


@dataclass(frozen=True, slots=True)
class Onlooker:
    """A follower that keeps nothing of its own: all it needs lies in the session's tokens and pages."""

    session: Followed

    def close(self) -> None:
        """See `Follower`."""

    @property
    def root_is_next(self) -> bool:
        """Whether KV and states of all tokens but the root are there."""
        return self.session.pages.num_missing == 1 and len(self.session.tokens) > 1


def best_guesses(
    session: Followed, logits: np.ndarray, position: int, path: Sequence[int], count: int
) -> list[tuple[int, float]]:
    """The `count` best guesses at a position, best first, each with its confidence; none from unusable logits.

    Args:
        session: Whose noise and processors apply.
        logits: float32 [vocab].
        position: Absolute position of the token to guess.
        path: Guessed tokens between the committed ones and that position.
        count: Most guesses.
    """
    try:
        token_ids, shares = session.rank(logits, position, NUM_RANKED, path)
    except UnusableLogitsError:
        return []
    sure = confidences(shares, greedy=session.greedy)
    return list(zip(token_ids, sure, strict=True))[:count]
