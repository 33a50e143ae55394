"""Calls whose arguments stand in tags, one by one: one reader, and the tags of each family as data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.gateway.message.reader import MAX_HEAD_CHARS, CallArguments, CallBegin, MarkedCalls, State
from paceline.gateway.message.schemas import type_of

Types = Mapping[str, Mapping[str, Sequence[str]]]
MAX_NAME_CHARS = 256
_PYTHONS_OWN = {"true": True, "false": False, "none": None, "null": None}
_NOT_JSON = object()
# Types of a parameter that the schema does not list.
_STRING = ("string",)
# Longer than any tag that ends a value.
_MAX_TAG_CHARS = 64
_TEXT, _JSON = "true", "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of a family.

    Attributes:
        begins: Markers of a call, or of a section of calls.
        head: A call up to its first argument, with the marker that it has begun with; its first group is the name.
        argument: Begins an argument: its name, and whether its value is text, where the tag says so.
        value_end: Ends a value.
        end: Ends a call.
        section_end: Ends a section of calls, or the outer tag of one; None: there are none.
        has_breaks: Whether a value has a line break before it and behind it.
        num_brackets: Count of `>`, in what begins an argument.
    """

    begins: tuple[str, ...]
    head: re.Pattern[str]
    argument: re.Pattern[str]
    value_end: re.Pattern[str]
    end: re.Pattern[str]
    section_end: re.Pattern[str] | None = None
    has_breaks: bool = False
    num_brackets: int = 1


# GLM-4.5 and later: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`, maybe with line breaks.
GLM_TAGS = Tags(
    begins=("<tool_call>",),
    head=re.compile(r"<tool_call>\s*([\w.:-]{1,256})\s*(?=<)"),
    argument=re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>"),
    value_end=re.compile("</arg_value>"),
    end=re.compile("</tool_call>"),
    num_brackets=3,
)
# DeepSeek V3.2, V4 and V4.1: `<DSML invoke name="NAME"><DSML parameter name="K" string="true">V</DSML parameter>`.
DSML = "｜DSML｜"  # noqa: RUF001 - its own spelling
DSML_TAGS = Tags(
    begins=(f"<{DSML}function_calls>", f"<{DSML}tool_calls>", f"<{DSML} calls>"),
    head=re.compile(rf'(?:<{DSML}(?: |function_|tool_)calls>)?\s*<{DSML} ?invoke name="([^"<>]{{1,256}})"\s*(?:/>|>)'),
    argument=re.compile(rf'<{DSML} ?parameter name="([^"<>]{{1,256}})"(?: string="(true|false)")?>'),
    value_end=re.compile(rf"</{DSML} ?parameter>"),
    end=re.compile(rf"</{DSML} ?invoke>"),
    section_end=re.compile(rf"</{DSML}(?: |function_|tool_)calls>"),
)
# Qwen3-Coder: `<tool_call>\n<function=NAME>\n<parameter=K>\nV\n</parameter>\n</function>\n</tool_call>`. The outer tag
# may be missing.
OUTER, OUTER_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_NAME = rf"([^<>\n]{{0,{MAX_NAME_CHARS - 1}}}[^<>\s])[^\S\n]*>"
QWEN3_CODER_TAGS = Tags(
    begins=(OUTER, FUNCTION),
    head=re.compile(rf"(?:{OUTER}\s*)?{FUNCTION}{_NAME}"),
    argument=re.compile(PARAMETER + _NAME),
    value_end=re.compile(PARAMETER_END),
    end=re.compile(FUNCTION_END),
    section_end=re.compile(OUTER_END),
    has_breaks=True,
)


class TaggedCalls(MarkedCalls):
    """Reads the calls of a family.

    Args:
        types: Types that parameters may have, by tool and name, where tags do not give them; empty: any.
    """

    def __init__(self, tags: Tags, types: Types) -> None:
        super().__init__(tags.begins)
        self._tags = tags
        self._types = types
        self._name = self._argument = self._kind = ""
        self._num_arguments = self._num_searched = 0
        self._break = "\n" if tags.has_breaks else ""

    def call(self) -> bool:
        """Reads the name."""
        begun = self._head()
        if begun is False:
            self.no_call()
        return begun is not None

    def _head(self) -> bool | None:
        """Takes the head of a call; False: there is none; None: that depends on what follows."""
        begun = self.held[:MAX_HEAD_CHARS]
        head = self._tags.head.match(self._marker + begun)
        if head is None:
            may_follow = len(begun) < MAX_HEAD_CHARS and not self.final and begun.count("<") <= 1
            return None if may_follow and (">" not in begun) else False
        self._name, self._num_arguments = head[1].strip(), 0
        self.found([CallBegin(self._name), CallArguments("{")])
        self.take(head.end() - len(self._marker))
        self._marker = ""
        self.state = self._members
        if head[0].endswith("/>"):
            self._close(self._between)
        return True

    def _close(self, then: State) -> None:
        self.found([CallArguments("}")])
        self.state = then

    def _members(self) -> bool:
        """Between arguments; text that does not belong there ends the call and is content."""
        self.skip_blank()
        argument, end = self._tags.argument.match(self.held), self._tags.end.match(self.held)
        if argument is not None:
            self._argument = argument[1].strip()
            self._kind = argument[2] or "" if self._tags.argument.groups > 1 else ""
            self._num_searched = 0
            self.take(argument.end())
            self.state = self._value
        elif end is not None:
            self.take(end.end())
            self._close(self._between)
        elif self._may_be_a_tag() and not self.final:
            return False
        else:
            if self._may_be_a_tag():
                # The answer breaks off within it.
                self.take_all()
            self._close(self._between)
        return True

    def _may_be_a_tag(self) -> bool:
        """Whether what is held may be the beginning of a tag."""
        is_whole = self.held.count(">") >= self._tags.num_brackets or len(self.held) >= MAX_HEAD_CHARS
        return self.held[:1] in ("", "<") and not is_whole

    def _value(self) -> bool:
        end = self._tags.value_end.search(self.held, self._num_searched)
        if end is not None:
            written = self._written(self.take(end.start()).removeprefix(self._break).removesuffix(self._break))
            self.take(len(end[0]))
            self.state = self._members
        elif self.final:
            # The answer breaks off, and the string with it.
            written = json.dumps(self.take_all().removeprefix(self._break), ensure_ascii=False)[:-1]
            self.state = self.content
        else:
            self._num_searched = max(0, len(self.held) - _MAX_TAG_CHARS)
            return False
        comma = ", " if self._num_arguments else ""
        self.found([CallArguments(f"{comma}{json.dumps(self._argument, ensure_ascii=False)}: {written}")])
        self._num_arguments += 1
        return True

    def _written(self, text: str) -> str:
        """Returns a value as JSON."""
        types: Sequence[str] = {_TEXT: _STRING, _JSON: ()}.get(
            self._kind, self._types.get(self._name, {}).get(self._argument, _STRING)
        )
        return bare_value(text, types)

    def _between(self) -> bool:
        """Behind a call: of a section, another one may follow."""
        if self._tags.section_end is None:
            self.state = self.content
            return True
        self.skip_blank()
        end = self._tags.section_end.match(self.held)
        if end is not None:
            self.take(end.end())
            self.state = self.content
            return True
        if self._tags.head.match(self.held[:MAX_HEAD_CHARS]) is not None:
            return bool(self._head())
        if self._may_be_a_tag() and not self.final:
            return False
        self.state = self.content
        return True


def bare_value(text: str, types: Sequence[str]) -> str:
    """Returns a value as JSON: text where that may be meant and nothing else that is allowed fits."""
    may_be_text = not types or "string" in types
    value = _NOT_JSON if tuple(types) == _STRING else _read(text, pythons_own=not types or not may_be_text)
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
