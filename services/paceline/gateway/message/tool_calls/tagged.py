"""Calls whose arguments stand in tags, one by one: one reader, and the tags of each family as data."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.gateway.message.reader import MAX_HEAD_CHARS, CallArguments, CallBegin, MarkedCalls, State
from paceline.gateway.message.tool_calls.qwen3_coder import Types, bare_value

# Longer than any tag that ends a value.
_MAX_TAG_CHARS = 64
_TEXT, _JSON = "true", "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of a family.

    Attributes:
        begins: Markers of a call, or of a section of calls.
        head: From there to the first argument; its first group is the name.
        argument: Begins an argument: its name, and whether its value is text, where the tag says so.
        value_end: Ends a value.
        end: Ends a call.
        section_end: Ends a section of calls; None: there are none.
    """

    begins: tuple[str, ...]
    head: re.Pattern[str]
    argument: re.Pattern[str]
    value_end: re.Pattern[str]
    end: re.Pattern[str]
    section_end: re.Pattern[str] | None = None


# GLM-4.5 and later: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>`, maybe with line breaks.
GLM_TAGS = Tags(
    begins=("<tool_call>",),
    head=re.compile(r"\s*([\w.:-]{1,256})\s*(?=<)"),
    argument=re.compile(r"<arg_key>([^<]{1,256})</arg_key>\s*<arg_value>"),
    value_end=re.compile("</arg_value>"),
    end=re.compile("</tool_call>"),
)
# DeepSeek V3.2, V4 and V4.1: `<DSML invoke name="NAME"><DSML parameter name="K" string="true">V</DSML parameter>`.
DSML = "｜DSML｜"  # noqa: RUF001 - its own spelling
DSML_TAGS = Tags(
    begins=(f"<{DSML}function_calls>", f"<{DSML}tool_calls>", f"<{DSML} calls>"),
    head=re.compile(rf'\s*<{DSML} ?invoke name="([^"]{{1,256}})"\s*(?:/>|>)'),
    argument=re.compile(rf'<{DSML} ?parameter name="([^"]{{1,256}})"(?: string="(true|false)")?>'),
    value_end=re.compile(rf"</{DSML} ?parameter>"),
    end=re.compile(rf"</{DSML} ?invoke>"),
    section_end=re.compile(rf"</{DSML}(?: |function_|tool_)calls>"),
)


class TaggedCalls(MarkedCalls):
    """Reads the calls of a family.

    Args:
        types: Types that parameters may have, by tool and name, where tags do not tell them; empty: any.
    """

    def __init__(self, tags: Tags, types: Types) -> None:
        super().__init__(tags.begins)
        self._tags = tags
        self._types = types
        self._name = self._argument = self._kind = ""
        self._num_arguments = self._num_searched = 0

    def call(self) -> bool:
        """Reads the name."""
        begun = self._head()
        if begun is False:
            self.no_call()
        return begun is not None

    def _head(self) -> bool | None:
        """Takes the head of a call; False: there is none; None: that depends on what follows."""
        begun = self.held[:MAX_HEAD_CHARS]
        head = self._tags.head.match(begun)
        if head is None:
            may_follow = len(begun) < MAX_HEAD_CHARS and not self.final and begun.count("<") <= 1
            return None if may_follow and (">" not in begun) else False
        self._name, self._num_arguments = head[1], 0
        self.found([CallBegin(head[1]), CallArguments("{")])
        self.take(head.end())
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
        elif self._is_open():
            return False
        else:
            if self.final:
                # The answer breaks off within a tag.
                self.take_all()
            self._close(self.content)
        return True

    def _is_open(self) -> bool:
        """Whether what is held may become a tag."""
        return not self.final and self.held[:1] in ("", "<") and len(self.held) < MAX_HEAD_CHARS

    def _value(self) -> bool:
        end = self._tags.value_end.search(self.held, self._num_searched)
        if end is not None:
            written = self._written(self.take(end.start()))
            self.take(len(end[0]))
            self.state = self._members
        elif self.final:
            # The answer breaks off, and the string with it.
            written = json.dumps(self.take_all(), ensure_ascii=False)[:-1]
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
        types: Sequence[str] = {_TEXT: ("string",), _JSON: ()}.get(
            self._kind, self._types.get(self._name, {}).get(self._argument, ("string",))
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
        if self._tags.head.match(self.held) is not None:
            return bool(self._head())
        if self._is_open():
            return False
        self.state = self.content
        return True
