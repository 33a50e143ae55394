"""Finds stop strings in a stream of text, and holds back only what may become one.

Pure. The result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


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
