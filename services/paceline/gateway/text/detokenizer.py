"""Turns a stream of token ids into a stream of text whose pieces join to the text of the whole.

Pure but for the codec. Stop strings are searched in its output.
`tokenizers.DecodeStream` is not enough: it never releases bytes that do not become a character, decodes all of them
again with each token, and raises an error where text follows a broken character of a byte-fallback vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most the three last tokens can still become part of one.
MAX_UNFINISHED_TOKENS = 3
MAX_HELD_TOKENS = 8
NUM_CONTEXT_TOKENS = 6


class Decodes(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens; broken UTF-8 becomes U+FFFD, and changes no text before it."""

    def is_visible(self, token_id: int) -> bool:
        """Tells whether a token has text."""


class Detokenizer:
    """Incremental decoder of one session.

    Text is returned when it ends on a whole character. Each piece is the difference of two decodings that start at the
    same earlier token, because some decoders treat the first token of a text in a special way.
    """

    def __init__(self, codec: Decodes, prompt_token_ids: Sequence[int] = ()) -> None:
        """Starts after a prompt, whose last tokens serve as context only."""
        self._codec = codec
        context = [t for t in prompt_token_ids[-NUM_CONTEXT_TOKENS:] if codec.is_visible(t)]
        if codec.decode(context).endswith(REPLACEMENT):
            context = []
        self._window = context
        self._num_given = len(context)

    @property
    def holds_text(self) -> bool:
        """Whether tokens wait for the rest of a character."""
        return len(self._window) > self._num_given

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens and returns the text that is certain by now."""
        fresh = [token_id for token_id in token_ids if self._codec.is_visible(token_id)]
        self._window += fresh
        pieces: list[str] = []
        for end in range(len(self._window), len(self._window) - len(fresh), -1):
            piece = self._difference(end)
            if not piece.endswith(REPLACEMENT):
                self._give(end, piece)
                pieces.append(piece)
                break
        if len(self._window) - self._num_given > MAX_HELD_TOKENS:
            pieces.append(self._force())
        return "".join(pieces)

    def flush(self) -> str:
        """Returns what was held back, half characters as U+FFFD; nothing may be fed afterwards."""
        piece = self._difference(len(self._window))
        self._give(len(self._window), piece)
        return piece

    def _difference(self, end: int) -> str:
        if end == self._num_given:
            return ""
        given = self._codec.decode(self._window[: self._num_given])
        return self._codec.decode(self._window[:end])[len(given) :]

    def _give(self, end: int, piece: str) -> None:
        # A window without text so far stays: otherwise the next token would be decoded as the first of a text.
        if piece:
            self._window = self._window[self._num_given :]
            end -= self._num_given
        self._num_given = end

    def _force(self) -> str:
        """Returns bytes that no later token can complete to a character."""
        whole = self._difference(len(self._window))
        for end in range(len(self._window) - MAX_UNFINISHED_TOKENS, self._num_given, -1):
            piece = self._difference(end)
            if whole.startswith(piece):
                self._give(end, piece)
                return piece
        return ""
