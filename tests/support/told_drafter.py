"""A drafter for stories without models: it knows the text, answers at once, and errs where it is told to."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from paceline.core.messages import (
    CloseSession,
    Commit,
    Drafts,
    OpenSession,
    ToDrafter,
    ToVerifier,
)
from tests.support.guesses import NodeGuess, SessionDrafts, to_drafts


class ToldDrafter:
    """Drafts chains of the text that it was told, for all sessions.

    Args:
        text: The token at each position.
        length: Of a chain.
        confidence: In every guess.
    """

    def __init__(self, text: Sequence[int], *, length: int = 4, confidence: float = 0.95) -> None:
        self.text = text
        self.heard: list[ToDrafter] = []
        self._length = length
        self._confidence = confidence
        self._known: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._ids = itertools.count(1)

    @property
    def sessions(self) -> Mapping[str, int]:
        """Committed tokens that it knows of each session."""
        return self._known

    def hear(self, messages: Sequence[ToDrafter]) -> list[ToVerifier]:
        """Takes in messages; returns what it says to them."""
        self.heard += messages
        return [said for message in messages if (said := self._answer(message)) is not None]

    def _answer(self, message: ToDrafter) -> ToVerifier | None:
        match message:
            case OpenSession():
                self._known[message.session_id] = len(message.token_ids)
                self._numbers[message.session_id] = message.number
            case Commit():
                assert message.base_len == self._known[message.session_id], "a verifier tells all"
                self._known[message.session_id] += len(message.token_ids)
            case CloseSession():
                del self._known[message.session_id]
                return None
            case _:
                return None
        return self._chain(message.session_id) if message.price < 1.0 else None

    def _chain(self, session_id: str) -> Drafts:
        known = self._known[session_id]
        guesses = [self.text[position] for position in range(known, min(known + self._length, len(self.text)))]
        nodes, parent = [], 0
        for token_id in guesses:
            node_id = next(self._ids)
            nodes.append(NodeGuess(node_id, parent, token_id, self._confidence))
            parent = node_id
        return to_drafts(SessionDrafts(self._numbers[session_id], known, nodes))
