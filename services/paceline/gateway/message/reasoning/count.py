"""Counts the tokens of an answer that are reasoning, however they come: in steps, or behind those that a client has."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

# Tokens that the end of reasoning may spread over, each a byte at least.
MARKER_TOKENS = 24


class ReasoningCount:
    """Tokens up to the end of reasoning, its marks included.

    Args:
        begin: What it begins with.
        end: What it ends with.
        decode: Text of tokens, special ones spelled out.
        begun: Whether the answer begins within it.
    """

    def __init__(self, begin: str, end: str, decode: Callable[[Sequence[int]], str], *, begun: bool) -> None:
        self._begin = begin
        self._end = end
        self._decode = decode
        self._begun = begun
        self._over = False
        # Those at the end, in which the mark may have begun; before reasoning begins, all.
        self._last: list[int] = []
        self.num_tokens = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of the answer."""
        if self._over:
            return
        known = len(self._last) if self._begun else 0
        self._last = [*self._last, *token_ids]
        if not self._begun and not self._begins():
            return
        ids = self._last
        self._over = self._ends(len(ids))
        end = bisect_left(range(len(ids)), True, lo=known, key=self._ends) if self._over else len(ids)
        self.num_tokens += end - known
        self._last = ids[-MARKER_TOKENS:]

    def _begins(self) -> bool:
        """Tells whether it has begun; an answer that begins otherwise has none."""
        text = self._decode(self._last).lstrip()
        self._begun = text.startswith(self._begin)
        self._over = not self._begun and (not self._begin.startswith(text) or len(self._last) > MARKER_TOKENS)
        return self._begun

    def _ends(self, count: int) -> bool:
        return self._end in self._decode(self._last[:count])
