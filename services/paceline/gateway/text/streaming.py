"""From tokens to text as they come: decoding, stop strings, and which text came from which token.

Pure but for the codec. `tokenizers.DecodeStream` is not enough: it never releases bytes that do not
become a character, decodes all of them again with each token, and raises an error where text follows a broken character
of a byte-fallback vocabulary.

Text lags behind tokens: half a character waits for the rest of it, and a possible stop string waits for more. Of
requests that ask for each token's text, a token is returned once all of its text is certain, so that the returned texts
join to the text of the answer and every token appears once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.messages import TokenOrigin

if TYPE_CHECKING:
    from paceline.gateway.text.codec import TextCodec

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most the three last tokens can still become part of one.
MAX_UNFINISHED_TOKENS = 3
MAX_HELD_TOKENS = 8
NUM_CONTEXT_TOKENS = 6


class Detokenizer:
    """Incremental decoder of one session.

    Text is returned when it ends on a whole character. Each piece is the difference of two decodings that start at the
    same earlier token, because some decoders treat the first token of a text in a special way.
    """

    def __init__(
        self, codec: TextCodec, prompt_token_ids: Sequence[int] = (), shown: Collection[int] = frozenset()
    ) -> None:
        """Starts after a prompt, whose last tokens serve as context only.

        Args:
            shown: Special tokens that have text.
        """
        self._codec = codec
        self._shown = shown
        context = self._visible(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        if self._decode(context).endswith(REPLACEMENT):
            context = []
        self._window = context
        self._num_given = len(context)

    @property
    def holds_text(self) -> bool:
        """Whether tokens wait for the rest of a character."""
        return len(self._window) > self._num_given

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes new tokens and returns the text that is certain by now."""
        fresh = self._visible(token_ids)
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

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        return [each for each in token_ids if self._codec.is_visible(each) or each in self._shown]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids, special_tokens=True)

    def _difference(self, end: int) -> str:
        if end == self._num_given:
            return ""
        given = self._decode(self._window[: self._num_given])
        return self._decode(self._window[:end])[len(given) :]

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


class StopMatcher:
    """Matches several stop strings at once: the first complete one wins, the longest of several at the same place."""

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""

    def feed(self, text: str, *, may_match: bool = True) -> tuple[str, str | None]:
        """Takes new text; returns what is certain not to belong to a stop string, and the stop string that ended it.

        After a stop string was found nothing may be fed.

        Args:
            may_match: Whether a stop string that ends in this text counts.
        """
        if not self._stops:
            return text, None
        num_held, text = len(self._held), self._held + text
        match = self._first_match(text, num_held) if may_match else None
        if match is not None:
            start, stop = match
            self._held = ""
            return text[:start], stop
        cut = certain_len(text, self._stops)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Returns the text held back; the stream ended without completing a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, num_held: int) -> tuple[int, str] | None:
        """Returns start and stop string of the match that ends first behind what was held, of several the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, num_held - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else best[1:]


def certain_len(text: str, markers: tuple[str, ...]) -> int:
    """Returns how much of a text cannot be the beginning of a marker that further text completes."""
    return min((_possible_start(text, marker) for marker in markers), default=len(text))


def _possible_start(text: str, marker: str) -> int:
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return at
        at = text.find(marker[0], at + 1)
    return len(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A token's part of the text.

    Attributes:
        text: Empty for a stop token or a part of a stop string, unless these are asked for, and for all but the last of
            the tokens that share a character.
        origin: How it came about; None: the verifier did not report it.
    """

    text: str
    origin: TokenOrigin | None


class TokenTexts:
    """Tokens of one session that wait for their text to be certain."""

    def __init__(self) -> None:
        self._waiting: deque[TokenText] = deque()
        # Characters at the front of what waits that are certain to belong to the answer.
        self._num_certain = 0

    def add(self, origin: TokenOrigin | None, decoded: str, passed: str) -> None:
        """Takes a token.

        Args:
            origin: How it came about.
            decoded: Text that it completed.
            passed: Text that has become certain with it; the oldest that was not certain before.
        """
        self._waiting.append(TokenText(text=decoded, origin=origin))
        self._num_certain += len(passed)

    def take(self, *, keep_last: bool) -> tuple[TokenText, ...]:
        """Returns the tokens whose text is certain; the last one stays if it may get more text."""
        taken: list[TokenText] = []
        while len(self._waiting) > keep_last and len(self._waiting[0].text) <= self._num_certain:
            self._num_certain -= len(self._waiting[0].text)
            taken.append(self._waiting.popleft())
        return tuple(taken)

    def finish(self, decoded: str, passed: str) -> tuple[TokenText, ...]:
        """Returns all remaining tokens, cut where the answer ends.

        Args:
            decoded: Text that the detokenizer still held.
            passed: Text that has now become certain; text beyond it was part of a stop string.
        """
        if decoded:
            last = self._waiting.pop()
            self._waiting.append(replace(last, text=last.text + decoded))
        self._num_certain += len(passed)
        taken: list[TokenText] = []
        for each in self._waiting:
            text = each.text[: self._num_certain]
            self._num_certain -= len(text)
            taken.append(replace(each, text=text))
        self._waiting.clear()
        return tuple(taken)
