"""The interface of sources of draft nodes inside the verifier; drafters send `paceline.core.messages` instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, Generic, Protocol, Self, TypeVar

import numpy as np

from paceline.core.grammar import OutputGrammar
from paceline.core.pages import SessionPages, SlotPool
from paceline.core.params import SOURCES
from paceline.core.tree import DraftTree


class Followed(Protocol):
    """A session as sources see it."""

    @property
    def tokens(self) -> Sequence[int]:
        """Its committed tokens; grows with every commit."""
        ...

    @property
    def output(self) -> tuple[int, Sequence[int]]:
        """Where in its tokens the output begins, and what its client predicts of it."""
        ...

    @property
    def greedy(self) -> bool:
        """Whether its target chooses without noise."""
        ...

    @property
    def grammar(self) -> OutputGrammar | None:
        """The grammar of its output; None: none."""
        ...

    @property
    def pages(self) -> SessionPages:
        """Where KV and states of its committed tokens lie; those of the last one are not computed yet."""
        ...

    def rank(self, logits: np.ndarray, position: int, count: int, path: Sequence[int]) -> tuple[list[int], list[float]]:
        """The best guesses at a position from logits float32 [vocab]; see `RowSampler.rank`."""
        ...


# A source at work on one session.
FollowerT = TypeVar("FollowerT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Generic[FollowerT]):
    """A session whose last tokens have just been committed, and what may be guessed of the next ones.

    Attributes:
        follower: The source at work on it.
        tree: Where to add guesses.
        least: Survival below which no guess is worth a place.
    """

    follower: FollowerT
    tree: DraftTree
    limit: int
    least: float


class LocalSource(Protocol[FollowerT]):
    """A source inside the verifier.

    Attributes:
        name: The method's name.
        needs_device: Whether it computes anything where the model is.
    """

    name: str
    needs_device: bool = True

    @classmethod
    def make(cls, settings: Any, decoder: Any) -> Self:
        """Makes it from `--speculative-config` and the target's `Decoder`, which has made no cache yet.

        Raises:
            ConfigError: It does not fit the target.
        """
        del settings, decoder
        return cls()

    def attach(self, cache: Any, scratch: SlotPool) -> None:
        """Called once, before any session: the target's KV and states, and slots for rows of its own."""
        return

    def follow(self, session: Followed) -> FollowerT | None:
        """Begins to follow a session; None: it has nothing to guess for it."""
        ...

    def may_guess(self, follower: FollowerT) -> bool:
        """Whether there may be something to guess, found out cheaply; asked before each `grow`."""
        del follower
        return True

    def grow(self, turns: Sequence[Turn[FollowerT]]) -> None:
        """Adds guesses to the trees of all sessions of a step at once."""
        ...


AnySource = LocalSource[Any]


def source_class(method: str) -> type[AnySource]:
    """Returns the class of a method's source; only the module of a method that is served is imported."""
    source: type[AnySource] = resolve_name(f"paceline.drafting.{SOURCES[method]}")
    return source
