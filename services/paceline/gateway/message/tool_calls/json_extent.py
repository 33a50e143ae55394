"""Finds the end of a JSON object or array, or of one in Python's notation, in text that comes in pieces.

Pure. It looks at each character once and at brackets and quotes only, so what stands between may be no JSON at all.
"""

from __future__ import annotations

import re


class Extent:
    """One value, from its opening bracket on.

    Args:
        depth: Brackets that are open already.
        quotes: What strings are written in.
    """

    def __init__(self, depth: int = 0, quotes: str = '"') -> None:
        self._depth = depth
        self._outside = re.compile(rf"[\[\](){{}}{quotes}]")
        self._inside = {quote: re.compile(rf"[\\{quote}]") for quote in quotes}
        self._quote = ""
        # Of the next piece, the rest of an escape that the last one broke off within.
        self._skip = 0

    def scan(self, text: str) -> int | None:
        """Takes further text; returns how much of it belongs to the value if that ends in it, else None."""
        at, self._skip = self._skip, 0
        while match := (self._inside[self._quote] if self._quote else self._outside).search(text, at):
            at = match.end()
            if self._closes(match[0]):
                return at
            if match[0] == "\\":
                at += 1
        self._skip = max(0, at - len(text))
        return None

    def _closes(self, found: str) -> bool:
        """Notes a bracket or quote; tells whether it ends the value."""
        if self._quote:
            self._quote = "" if found == self._quote else self._quote
        elif found in self._inside:
            self._quote = found
        else:
            self._depth += 1 if found in "[{(" else -1
            return self._depth <= 0
        return False
