"""The tokens that a grammar allows after a session's output, and when its text ends.

Knows no library of grammars; `GrammarState` is what one has to offer. A token that ends the text is no part of it: it
may be chosen where the grammar may end, whatever the text of that token, and where the grammar has ended nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.errors import InvalidRequestError

# A bit per token id, uint8 [bytes]: id i is bit i % 8 of byte i // 8.
Bits = npt.NDArray[np.uint8]

FIELD = "grammar"


class GrammarState(Protocol):
    """Where a text stands in its grammar; one thread at a time uses it."""

    @property
    def may_end(self) -> bool:
        """Whether the text so far is a whole one."""
        ...

    def consume(self, token_ids: Sequence[int]) -> int:
        """Goes on by tokens, up to the first one that the grammar forbids; returns how many came before it."""
        ...

    def go_back(self, count: int) -> None:
        """Takes back the last `count` tokens."""
        ...

    def allowed(self) -> Bits:
        """Tokens with which the text may go on, as bits [bytes] of at least the vocabulary; the caller may change them.

        Raises:
            InvalidRequestError: The grammar is too complex for a bounded time.
            MovedError: The session's share of the lexer is used up; placed anew, it goes on by itself.
        """
        ...

    def forced(self) -> Sequence[int]:
        """How the text must go on, cut into tokens in the usual way; empty: more than one way is open.

        The text is sure, the cut is not: a model may spell it with other tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that may follow at one position.

    Attributes:
        bits: By id, [bytes].
        ended: No text may follow: these are tokens that end it, and they are chosen whatever else bars them.
    """

    bits: Bits
    ended: bool = False


class OutputGrammar:
    """The grammar of one session's output, moved on with every committed token.

    Args:
        state: Before the first token of the output.
        vocab_size: Ids of the model.
        stop_ids: Tokens that end the session.
        eos_token_ids: The model's end tokens. Ids that do not end the session fill its rest once the text has ended.
    """

    def __init__(
        self, state: GrammarState, *, vocab_size: int, stop_ids: frozenset[int], eos_token_ids: Sequence[int]
    ) -> None:
        self._state = state
        self._num_bytes = -(-vocab_size // 8)
        self._stop_ids = stop_ids
        # These ids are never text: no grammar gets them.
        self._ends = stop_ids | frozenset(eos_token_ids)
        # Tokens that follow a text which cannot go on.
        self._last = tuple(stop_ids) or tuple(eos_token_ids)
        self._vocab_size = vocab_size
        self._over = False

    def push(self, token_ids: Sequence[int]) -> None:
        """Goes on by committed tokens.

        Raises:
            InvalidRequestError: The grammar forbids them, or as of `GrammarState.allowed`.
            MovedError: As of `GrammarState.allowed`.
        """
        text = self._text_of(token_ids)
        num_consumed = self._state.consume(text) if text else 0
        if num_consumed < len(text) or not self._may_end_with(token_ids[len(text) :]):
            self._state.go_back(num_consumed)
            # Raises if it is not the tokens that are at fault.
            self._state.allowed()
            raise InvalidRequestError(FIELD, "forbids the tokens that the output goes on with")
        self._over = self._over or len(text) < len(token_ids)

    def permits(self, path: Sequence[int]) -> bool:
        """Whether the output may go on by these tokens; it computes no mask, so drafters may have it asked often."""
        text = self._text_of(path)
        with self._after(text) as num_consumed:
            return num_consumed == len(text) and self._may_end_with(path[len(text) :])

    def _may_end_with(self, ends: Sequence[int]) -> bool:
        """Whether these may come next, from the first token on that is no text."""
        return not ends or ((self._over or self._state.may_end) and all(each in self._last for each in ends))

    def after(self, path: Sequence[int] = ()) -> Allowed:
        """Tokens that may follow the output and a path of tokens; after a forbidden path, any.

        Raises:
            InvalidRequestError: The grammar is too complex, or leads nowhere.
        """
        text = self._text_of(path)
        if self._over or len(text) < len(path):
            return Allowed(self._only(self._last), ended=True)
        with self._after(text) as num_consumed:
            if num_consumed < len(text):
                return Allowed(np.full(self._num_bytes, 255, np.uint8))
            return self._here()

    def forced(self, path: Sequence[int] = ()) -> Sequence[int]:
        """Text tokens that come next for sure, in their usual spelling; see `GrammarState.forced`."""
        text = self._text_of(path)
        if self._over or len(text) < len(path):
            return ()
        with self._after(text) as num_consumed:
            return self._state.forced() if num_consumed == len(text) else ()

    def _here(self) -> Allowed:
        bits = self._state.allowed()[: self._num_bytes]
        _clear(bits, self._ends)
        if beyond := 8 * self._num_bytes - self._vocab_size:
            bits[-1] &= 255 >> beyond
        if not bits.any():
            if not self._state.may_end:
                raise InvalidRequestError(FIELD, "leaves no token to choose: this vocabulary cannot spell what is left")
            return Allowed(self._only(self._last), ended=True)
        if self._state.may_end:
            _set(bits, self._stop_ids)
        return Allowed(bits)

    def _text_of(self, path: Sequence[int]) -> Sequence[int]:
        """The tokens of a path before the first that is no text."""
        if self._over:
            return ()
        return path[: next((index for index, token_id in enumerate(path) if token_id in self._ends), len(path))]

    @contextmanager
    def _after(self, text: Sequence[int]) -> Iterator[int]:
        """Goes on by text for the time of the block; yields how many tokens the grammar takes."""
        num_consumed = self._state.consume(text) if text else 0
        try:
            yield num_consumed
        finally:
            if num_consumed:
                self._state.go_back(num_consumed)

    def _only(self, token_ids: Sequence[int]) -> Bits:
        bits = np.zeros(self._num_bytes, np.uint8)
        _set(bits, token_ids)
        return bits


def _set(bits: Bits, token_ids: Sequence[int] | frozenset[int]) -> None:
    for token_id in token_ids:
        bits[token_id >> 3] |= 1 << (token_id & 7)


def _clear(bits: Bits, token_ids: frozenset[int]) -> None:
    for token_id in token_ids:
        bits[token_id >> 3] &= 255 ^ (1 << (token_id & 7))
