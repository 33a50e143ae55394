"""What a source of draft nodes inside the verifier looks like; the drafter tier speaks `paceline.core.messages`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paceline.core.tree import DraftTree


class Follower(Protocol):
    """A source inside the verifier, at work on one session."""

    def grow(self, tree: DraftTree, limit: int, least: float) -> Sequence[float]:
        """Hangs guesses into the tree of a session whose last tokens have just been committed.

        Args:
            tree: Where to.
            limit: Most guesses.
            least: Survival below which no guess is worth a place.

        Returns:
            Survival of each guess by this source alone, best first.
        """
        ...

    def close(self) -> None:
        """The session ended."""
        ...


class LocalSource(Protocol):
    """A source inside the verifier."""

    @property
    def name(self) -> str:
        """The method's name."""
        ...

    def follow(self, tokens: Sequence[int], prompt_len: int) -> Follower:
        """Goes to work on a session; `tokens` grows with every commit."""
        ...
