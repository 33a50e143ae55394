"""Which text came from which token, for requests that ask how each token came about.

Pure. Text lags behind tokens: half a character waits for the rest of it, and a possible stop string waits for more. A
token is returned once all of its text is certain, so that the returned texts join to the text of the answer and every
token appears once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from paceline.core.messages import TokenFate


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenText:
    """A token's part of the text.

    Attributes:
        text: Empty for a stop token or a part of a stop string, unless these are asked for, and for all but the last of
            the tokens that share a character.
        fate: How it came about; None: the verifier did not report it.
    """

    text: str
    fate: TokenFate | None


class TokenTexts:
    """Tokens of one session that wait for their text to be certain."""

    def __init__(self) -> None:
        self._waiting: deque[TokenText] = deque()
        # Characters at the front of what waits that are certain to belong to the answer.
        self._num_certain = 0

    def add(self, fate: TokenFate | None, decoded: str, passed: str) -> None:
        """Takes a token.

        Args:
            fate: How it came about.
            decoded: Text that it completed.
            passed: Text that has become certain with it; the oldest that was not certain before.
        """
        self._waiting.append(TokenText(text=decoded, fate=fate))
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
