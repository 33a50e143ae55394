"""Reads calls that are one JSON array of objects, or objects joined by another separator, and calls of a named tool."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.gateway.message.parts import CallArguments, CallBegin, Content
from paceline.gateway.message.reader import MAX_HEAD_CHARS, StatefulReader
from paceline.gateway.message.tool_calls.json_call import JsonCall


class JsonList(StatefulReader):
    """Reads calls from the beginning of a text; other text, and all that follows it, is content.

    Args:
        opening: Marker before the first call; may be empty.
        separator: Marker between two calls.
        closing: Marker behind the last call; may be empty.
        only: See `JsonCall`.

    Attributes:
        num_calls: Calls found so far.
    """

    def __init__(self, opening: str = "[", separator: str = ",", closing: str = "]", only: Sequence[str] = ()) -> None:
        super().__init__(self._open)
        self.num_calls = 0
        self._opening = opening
        self._separator = separator
        self._closing = closing
        self._only = only
        self._call = JsonCall(only)
        # Syntax that was taken before it was certain that a call follows.
        self._before = ""

    def _open(self) -> bool:
        if not self._take_blank():
            return True
        begins = self.begins(self._opening) if self._opening else self.final or bool(self.held) or None
        if begins:
            self._before += self.take(len(self._opening))
            self.state = self._blank
        elif begins is False:
            self._end()
        return begins is not None

    def _blank(self) -> bool:
        if not self._take_blank():
            return True
        if self.held or self.final:
            self._call = JsonCall(self._only)
            self.state = self._in_call
            return True
        return False

    def _in_call(self) -> bool:
        found = self.through(self._call)
        if self._call.failed:
            self._end()
        elif found:
            self._before = ""
        self.parts += found
        if not self._call.over:
            return False
        if not self._call.failed:
            self.num_calls += 1
            self.state = self._between
        return True

    def _between(self) -> bool:
        if not self._take_blank():
            return True
        if not self.held and not self.final:
            return False
        if self.held.startswith(self._separator):
            self._before += self.take(len(self._separator))
            self.state = self._blank
            return True
        if self._closing and self.held.startswith(self._closing):
            self._before = ""
            self.take(len(self._closing))
        self._end()
        return True

    def _take_blank(self) -> bool:
        """Takes white space; tells whether a call may still follow, which it does not behind too much of it."""
        self._before += self.take(len(self.held) - len(self.held.lstrip()))
        if len(self._before) > MAX_HEAD_CHARS:
            self._end()
        return not self.over

    def _end(self) -> None:
        """Returns syntax that no call has followed as content, unless it is white space behind a call."""
        if not self.num_calls or self._before.strip():
            self.parts.append(Content(self._before))
        self.over = True
        self.state = self._nothing

    def _nothing(self) -> bool:
        """Another reader takes what follows."""
        return False


class ListOnly(JsonList):
    """Reads a text of such calls alone; what follows them is content, except white space between."""

    def _nothing(self) -> bool:
        if self.num_calls:
            self.skip_blank()
        if self.held:
            self.state = self.rest_is_content
        return bool(self.held)


class NamedCall(StatefulReader):
    """A text that is the arguments of one tool, as a grammar enforces them.

    Args:
        name: Of the tool.
    """

    def __init__(self, name: str) -> None:
        super().__init__(self._begin)
        self._name = name

    def _begin(self) -> bool:
        self.skip_blank()
        if self.held:
            self.parts.append(CallBegin(self._name))
            self.state = self._arguments
        return bool(self.held)

    def _arguments(self) -> bool:
        self.parts.append(CallArguments(self.take_all()))
        return False
