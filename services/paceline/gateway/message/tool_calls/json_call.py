"""Reads calls written as JSON, `{"name": ..., "arguments": {...}}` or with `parameters`: one, or a list of them.

Once the name is read and the arguments have begun, they are returned as they come. An object with its members in
another order is read when it is complete, if it has at most `MAX_HELD_CHARS`. Text that turns out to be no call is
content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from paceline.gateway.message.reader import (
    MAX_HEAD_CHARS,
    MAX_HELD_CHARS,
    CallArguments,
    CallBegin,
    Content,
    StatefulReader,
)

ARGUMENTS = ("arguments", "parameters")
# As grammars have calls begin.
_BEGIN = '{"name": '
# Up to the bracket of the arguments.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\[\s\S])*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BLANK = re.compile(r"\s*")


class BracketScanner:
    """Finds the end of a JSON object or array, or of one in Python's notation, in text that comes in pieces.

    It looks at each character once and at brackets and quotes only, so the text between need not be JSON.

    Args:
        depth: Brackets that are open already.
        quotes: The quotes that strings are written in.
    """

    def __init__(self, depth: int = 0, quotes: str = '"') -> None:
        self._depth = depth
        self._outside = re.compile(rf"[\[\](){{}}{quotes}]")
        self._inside = {quote: re.compile(rf"[\\{quote}]") for quote in quotes}
        self._quote = ""
        # Characters of the next piece that belong to an escape cut off at the end of the last one.
        self._skip = 0

    def scan(self, text: str) -> int | None:
        """Takes further text; returns how much of it belongs to the value if that ends in it, otherwise None."""
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
        """Notes a bracket or quote; returns whether it ends the value."""
        if self._quote:
            self._quote = "" if found == self._quote else self._quote
        elif found in self._inside:
            self._quote = found
        else:
            self._depth += 1 if found in "[{(" else -1
            return self._depth <= 0
        return False


def _begin_alike(text: str, other: str) -> bool:
    return text.startswith(other) or other.startswith(text)


class JsonCall(StatefulReader):
    """Reads a call, white space before it included.

    Args:
        only: Tools that alone are called, in calls that begin as `_BEGIN` does; empty: any, and members in any order.

    Attributes:
        failed: Whether it turned out to be no call; its only part is the text that was looked at.
    """

    def __init__(self, only: Sequence[str] = ()) -> None:
        super().__init__(self._begin)
        self.failed = False
        self._heads = tuple(f'{_BEGIN}{json.dumps(name, ensure_ascii=False)}, "parameters": ' for name in only)
        self._extent = BracketScanner()
        self._num_scanned = 0

    def _begin(self) -> bool:
        begun = self.held[:MAX_HEAD_CHARS].lstrip()
        if self._heads and not any(_begin_alike(begun, head) for head in self._heads):
            return self._fail(0)
        head = _HEAD.match(self.held, 0, MAX_HEAD_CHARS)
        name = None if head is None else _decoded(head[1])
        if head is not None and isinstance(name, str) and name:
            self.take(head.end())
            self.parts.append(CallBegin(name))
            self._extent = BracketScanner()
            self.state = self._arguments
            return True
        blank = _BLANK.match(self.held, 0, MAX_HEAD_CHARS)
        begun_at = 0 if blank is None else blank.end()
        if self.held[begun_at : begun_at + 1] not in ("{", "") or (begun_at == MAX_HEAD_CHARS):
            return self._fail(0)
        length = self._scan()
        too_long = (len(self.held) if length is None else length) > MAX_HELD_CHARS
        if too_long or (length is None and self.final):
            return self._fail(MAX_HELD_CHARS)
        return length is not None and self._whole(length)

    def _whole(self, length: int) -> bool:
        # JSON knows fewer kinds of white space than Python.
        call = _call(self.held[:length].lstrip())
        if call is None:
            return self._fail(length)
        self.take(length)
        self.parts += call
        self._end()
        return False

    def _fail(self, length: int) -> bool:
        """Ends, since it is no call; so much of the text was looked at for it."""
        self.failed = True
        self.parts.append(Content(self.take(length)))
        self._end()
        return False

    def _arguments(self) -> bool:
        length = self._extent.scan(self.held)
        if self.held:
            self.parts.append(CallArguments(self.take(len(self.held) if length is None else length)))
        if length is not None:
            self.state = self._tail
        return length is not None

    def _tail(self) -> bool:
        self.skip_blank()
        if self.held.startswith(","):
            self._extent = BracketScanner(depth=1)
            self.state = self._further_members
            return True
        if self.held or self.final:
            self.take(1 if self.held.startswith("}") else 0)
            self._end()
        return False

    def _further_members(self) -> bool:
        """Members beside name and arguments, such as an id, are not used."""
        length = self._extent.scan(self.held)
        self.take(len(self.held) if length is None else length)
        if length is not None or self.final:
            self._end()
        return False

    def _scan(self) -> int | None:
        """Looks at new text; returns the length of the whole value if it has ended."""
        length = self._extent.scan(self.held[self._num_scanned :])
        end = None if length is None else self._num_scanned + length
        self._num_scanned = len(self.held)
        return end

    def _end(self) -> None:
        self.over = True
        self.state = lambda: False


def _decoded(text: str) -> Any:
    """Returns a value of JSON; None: it is none, or has numbers that JSON does not have."""
    try:
        value = json.loads(text)
        # Python reads NaN and the like.
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value


def _call(text: str) -> list[CallBegin | CallArguments] | None:
    """Returns the parts of a whole object, which may hold its arguments as a string; None: it is no call."""
    found = _decoded(text)
    if found is None:
        return None
    inner = found.get("function")
    found = inner if isinstance(inner, dict) else found
    name = found.get("name")
    arguments: Any = next((found[key] for key in ARGUMENTS if key in found), {})
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return [CallBegin(name), CallArguments(arguments)] if isinstance(arguments, str) else None


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
        """Takes white space; returns whether a call may still follow, which it does not behind too much of it."""
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
        name: Name of the tool.
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
