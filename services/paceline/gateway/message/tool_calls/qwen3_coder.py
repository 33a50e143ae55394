r"""Calls as Qwen3-Coder writes them, in tags.

`<tool_call>\n<function=name>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>`. Values are
written bare; the schema of the tool tells their types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.gateway.message.reader import MAX_HEAD_CHARS, CallArguments, CallBegin, MarkedCalls
from paceline.gateway.message.schemas import type_of

OUTER, OUTER_END = "<tool_call>", "</tool_call>"
BEGIN, END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
_PYTHONS_OWN = {"true": True, "false": False, "none": None, "null": None}
_NOT_JSON = object()
_TAG_END = re.compile(r"[>\n]")

Types = Mapping[str, Mapping[str, Sequence[str]]]
# Of a parameter that the schema does not list.
_TEXT = ("string",)


class Qwen3CoderCalls(MarkedCalls):
    """Reads them.

    Args:
        types: Types that parameters may have, by tool and name; empty: any. All others are strings.
        markers: The beginnings of calls.
    """

    def __init__(self, types: Types, markers: tuple[str, ...] = (OUTER, BEGIN)) -> None:
        super().__init__(markers)
        self._types = types
        self._of_tool: Mapping[str, Sequence[str]] = {}
        self._num_parameters = 0
        self._parameter = ""
        self._num_searched = 0

    def call(self) -> bool:
        """Reads the inner tag; the outer marker may be missing."""
        if self._marker == OUTER:
            begun = self.held[:MAX_HEAD_CHARS]
            bare = begun.lstrip()
            if BEGIN.startswith(bare) and bare != BEGIN and len(begun) < MAX_HEAD_CHARS and not self.final:
                return False
            if not bare.startswith(BEGIN):
                self.no_call()
                return True
            self._marker += self.take(len(begun) - len(bare) + len(BEGIN))
        self.state = self._name
        return True

    def _name(self) -> bool:
        name = self._tag()
        if name is None:
            return False
        if not name:
            self.no_call()
            return True
        self._of_tool = self._types.get(name, {})
        self._num_parameters = 0
        self.found([CallBegin(name), CallArguments("{")])
        self.state = self._members
        return True

    def _tag(self) -> str | None:
        """Takes a name up to the end of its tag; empty: there is none; None: it is not complete yet."""
        end = _TAG_END.search(self.held)
        if end is None and len(self.held) <= MAX_NAME_CHARS and not self.final:
            return None
        if end is None or end[0] != ">" or end.start() > MAX_NAME_CHARS:
            return ""
        name = self.held[: end.start()].strip()
        if name:
            self.take(end.end())
        return name

    def _members(self) -> bool:
        """Between parameters; text that does not belong there ends the call and is content."""
        self.skip_blank()
        parameter, end = self.begins(PARAMETER), self.begins(END)
        if parameter:
            self.take(len(PARAMETER))
            self.state = self._parameter_name
            return True
        if end is None or parameter is None:
            return False
        self.take(len(END) if end else 0)
        self.found([CallArguments("}")])
        self.state = self._end
        return True

    def _parameter_name(self) -> bool:
        name = self._tag()
        if name is None:
            return False
        if not name:
            self.held = PARAMETER + self.held
            self.found([CallArguments("}")])
            self.state = self.content
            return True
        self._parameter = name
        self._num_searched = 0
        self.state = self._value
        return True

    def _value(self) -> bool:
        end = self.held.find(PARAMETER_END, self._num_searched)
        if end >= 0:
            written = self._member(self.take(end))
            self.take(len(PARAMETER_END))
            self.state = self._members
        elif self.final:
            # The answer breaks off, and the string with it.
            written = self._member(self.take(len(self.held)), whole=False)
            self.state = self.content
        else:
            self._num_searched = max(0, len(self.held) - len(PARAMETER_END))
            return False
        self.found([CallArguments(written)])
        self._num_parameters += 1
        return True

    def _member(self, text: str, *, whole: bool = True) -> str:
        text = text.removeprefix("\n")
        key = (", " if self._num_parameters else "") + json.dumps(self._parameter, ensure_ascii=False) + ": "
        if not whole:
            return key + json.dumps(text, ensure_ascii=False)[:-1]
        return key + bare_value(text.removesuffix("\n"), self._of_tool.get(self._parameter, _TEXT))

    def _end(self) -> bool:
        return self.pass_marker(OUTER_END, self.content)


def bare_value(text: str, types: Sequence[str]) -> str:
    """Returns a value as JSON: text where that may be meant and nothing else that is allowed fits."""
    may_be_text = not types or "string" in types
    value = _NOT_JSON if tuple(types) == _TEXT else _read(text, pythons_own=not types or not may_be_text)
    kept = value is not _NOT_JSON and (not may_be_text or not types or _is_one_of(value, types))
    return json.dumps(value if kept else text, ensure_ascii=False)


def _read(text: str, *, pythons_own: bool) -> Any:
    """Returns a value of JSON, whose constants may be spelled as in Python; `_NOT_JSON`: it is none."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _PYTHONS_OWN.get(text.strip().lower(), _NOT_JSON) if pythons_own else _NOT_JSON
    return value


def _is_one_of(value: Any, types: Sequence[str]) -> bool:
    """Tells whether a value that is no string has one of the types."""
    return type_of(value) in types and not isinstance(value, str)
