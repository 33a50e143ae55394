"""Reads one call written as a JSON object: `{"name": ..., "arguments": {...}}`, or with `parameters`.

Once the name is read and the arguments have begun, they are given out as they come. An object that has its members in
another order is read when it is whole. What turns out to be no call is given back untouched.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.gateway.message.held_text import StatefulReader
from paceline.gateway.message.parts import CallArguments, CallBegin
from paceline.gateway.message.tool_calls.json_extent import Extent

ARGUMENTS = ("arguments", "parameters")
MAX_HEAD_CHARS = 1024
_decoder = json.JSONDecoder()


class _UnfinishedError(Exception):
    """The text ends too early to say."""


class _OtherError(Exception):
    """It does not begin with name and arguments."""


class JsonCall(StatefulReader):
    """One call, from its opening bracket on.

    Attributes:
        over: Whether the object has ended; `held` is what follows it.
        failed: Whether it is no call; `held` is all of its text.
    """

    def __init__(self) -> None:
        super().__init__(self._head)
        self.over = False
        self.failed = False
        self._extent = Extent()
        self._num_scanned = 0

    def _head(self) -> bool:
        try:
            name, length = _head(self.held)
        except _UnfinishedError:
            if not self.final and len(self.held) <= MAX_HEAD_CHARS:
                return False
            self.state = self._whole
        except _OtherError:
            self.state = self._whole
        else:
            self.take(length)
            self.parts.append(CallBegin(name))
            self.state = self._arguments
        return True

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
            self._extent, self._num_scanned = Extent(depth=1), 0
            self.state = self._further_members
            return True
        if self.held or self.final:
            self.take(1 if self.held.startswith("}") else 0)
            self._end()
        return False

    def _further_members(self) -> bool:
        """Members beside name and arguments, such as an id, say nothing that is used."""
        length = self._scan()
        if length is not None:
            self.take(length)
        if length is not None or self.final:
            self._end()
        return False

    def _whole(self) -> bool:
        length = self._scan() if self.held.startswith("{") else None
        if length is not None:
            call = _call(self.held[:length])
            if call is None:
                self.failed = True
            else:
                self.take(length)
                self.parts += call
            self._end()
        elif self.final or not "{".startswith(self.held[:1]):
            self.failed = True
            self._end()
        return False

    def _scan(self) -> int | None:
        """Looks at what is new; returns the length of all of the value if it has ended."""
        length = self._extent.scan(self.held[self._num_scanned :])
        end = None if length is None else self._num_scanned + length
        self._num_scanned = len(self.held)
        return end

    def _end(self) -> None:
        self.over = True
        self.state = _rest


def _rest() -> bool:
    return False


def _head(text: str) -> tuple[str, int]:
    """Returns the name, and where the arguments begin."""
    at = _expect(text, 0, "{")
    key, at = _string(text, at)
    if key != "name":
        raise _OtherError
    name, at = _string(text, _expect(text, at, ":"))
    key, at = _string(text, _expect(text, at, ","))
    if key not in ARGUMENTS or not name:
        raise _OtherError
    return name, _expect(text, _expect(text, at, ":"), "{") - 1


def _expect(text: str, at: int, wanted: str) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    if at == len(text):
        raise _UnfinishedError
    if text[at] != wanted:
        raise _OtherError
    return at + 1


def _string(text: str, at: int) -> tuple[str, int]:
    begin = _expect(text, at, '"')
    end = begin
    while end < len(text) and text[end] != '"':
        end += 2 if text[end] == "\\" else 1
    if end >= len(text):
        raise _UnfinishedError
    try:
        return json.loads(text[begin - 1 : end + 1]), end + 1
    except ValueError:
        raise _OtherError from None


def _call(text: str) -> list[CallBegin | CallArguments] | None:
    """Returns the parts of a whole object, which may hold its arguments as a string; None: it is no call."""
    try:
        found: Any = _decoder.decode(text)
        # Python reads NaN and the like, and JSON does not have them.
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
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
