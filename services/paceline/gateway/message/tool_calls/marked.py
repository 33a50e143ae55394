"""Base of readers whose calls follow a marker within content."""

from __future__ import annotations

from abc import abstractmethod

from paceline.gateway.message.parts import CallBegin, Content, Part
from paceline.gateway.message.reader import MAX_HEAD_CHARS, StatefulReader, first_marker
from paceline.gateway.text.stops import certain_len


class MarkedCalls(StatefulReader):
    """Reads content up to a marker, then a call with `call`, then content again.

    White space before a marker, and behind a call at the end of the text, is no content, unless it is very long.

    Args:
        markers: The beginnings of calls.
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        super().__init__(self.content)
        self._markers = markers
        self._has_calls = False
        self._marker = self._blank_before = ""

    @abstractmethod
    def call(self) -> bool:
        """State behind a marker, which is already taken; its last step returns to `content`."""

    def content(self) -> bool:
        found = first_marker(self.held, self._markers)
        if found is not None:
            before = self.take(found[0])
            bare = _bare_len(before)
            self._give(before[:bare])
            self._blank_before = before[bare:]
            self._marker = self.take(len(found[1]))
            self.state = self.call
            return True
        length = len(self.held) if self.final else certain_len(self.held, self._markers)
        text = self.held[:length]
        bare = _bare_len(text)
        if not self.final:
            self._give(self.take(bare))
        elif bare or not self._has_calls:
            self._give(self.take(length))
        return False

    def no_call(self) -> None:
        """What follows the marker is no call: the marker and the white space before it are content, too."""
        self._give(self._blank_before + self._marker)
        self.state = self.content

    def found(self, parts: list[Part]) -> None:
        """Adds parts that a call consists of."""
        self._has_calls |= any(isinstance(each, CallBegin) for each in parts)
        self.parts += parts

    def _give(self, text: str) -> None:
        if text:
            self.parts.append(Content(text))


class NoCalls(MarkedCalls):
    """Reads content alone."""

    def __init__(self) -> None:
        super().__init__(())

    def call(self) -> bool:
        """No marker leads here."""
        return False


def _bare_len(text: str) -> int:
    """Returns the length of a text without the white space that it ends with."""
    return max(len(text.rstrip()), len(text) - MAX_HEAD_CHARS)
