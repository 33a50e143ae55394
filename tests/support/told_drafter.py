"""A drafter for stories without models: it knows the text, answers at once, and errs where it is told to."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from paceline.core.messages import (
    CloseSession,
    Commits,
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
        self._known: dict[int, int] = {}
        self._ids = itertools.count(1)

    @property
    def sessions(self) -> Mapping[int, int]:
        """Committed tokens that it knows of each session, by number."""
        return self._known

    def hear(self, messages: Sequence[ToDrafter]) -> list[ToVerifier]:
        """Handles messages; returns what it says to them."""
        self.heard += messages
        return [said for message in messages for said in self._answers(message)]

    def _answers(self, message: ToDrafter) -> Iterator[ToVerifier]:
        match message:
            case OpenSession():
                self._known[message.number] = len(message.token_ids)
                if message.price < 1.0:
                    yield self._chain(message.number)
            case Commits():
                for commit in message:
                    assert commit.base_len == self._known[commit.number], "a verifier tells all"
                    self._known[commit.number] += len(commit.token_ids)
                    if commit.price < 1.0:
                        yield self._chain(commit.number)
            case CloseSession():
                del self._known[message.number]

    def _chain(self, number: int) -> Drafts:
        known = self._known[number]
        guesses = [self.text[position] for position in range(known, min(known + self._length, len(self.text)))]
        nodes, parent = [], 0
        for token_id in guesses:
            node_id = next(self._ids)
            nodes.append(NodeGuess(node_id, parent, token_id, self._confidence))
            parent = node_id
        return to_drafts(SessionDrafts(number, known, nodes))
