"""Calls between special tokens, each a name and a JSON object: one reader, and the tokens of each family as data."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paceline.gateway.message.reader import MAX_HEAD_CHARS, CallArguments, CallBegin, MarkedCalls, first_marker
from paceline.gateway.message.tool_calls.json_call import Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonMarks:
    """The tokens of a family.

    Attributes:
        section: Begins a list of calls, and may be missing.
        section_end: Ends it.
        begin: Begins a call.
        head: From there to the object of its arguments; its first group is the name.
        closing: May stand behind the object, in any order.
        inner: Further special tokens within a head.
    """

    section: str
    section_end: str
    begin: str
    head: re.Pattern[str]
    closing: tuple[str, ...]
    inner: tuple[str, ...]

    @property
    def tokens(self) -> tuple[str, ...]:
        """All special tokens that a reader must see."""
        return (self.section, self.section_end, self.begin, *self.closing, *self.inner)


# V3 and R1: `function<sep>NAME`, and the object in a fence; V3.1: `NAME<sep>{...}`.
DEEPSEEK_MARKS = JsonMarks(
    section="<｜tool▁calls▁begin｜>",  # noqa: RUF001 - its own spelling
    section_end="<｜tool▁calls▁end｜>",  # noqa: RUF001
    begin="<｜tool▁call▁begin｜>",  # noqa: RUF001
    head=re.compile(r"\s*(?:function<｜tool▁sep｜>)?([\w.:-]{1,256})(?:<｜tool▁sep｜>|\s*```json)\s*(?=\{)"),  # noqa: RUF001
    closing=("<｜tool▁call▁end｜>", "```"),  # noqa: RUF001
    inner=("<｜tool▁sep｜>",),  # noqa: RUF001
)
# K2: `functions.NAME:INDEX<argument_begin>{...}`.
KIMI_MARKS = JsonMarks(
    section="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    begin="<|tool_call_begin|>",
    head=re.compile(r"\s*(?:functions\.)?([\w.-]{1,256})(?::\d{1,9})?\s*<\|tool_call_argument_begin\|>\s*(?=\{)"),
    closing=("<|tool_call_end|>",),
    inner=("<|tool_call_argument_begin|>",),
)


class MarkedJsonCalls(MarkedCalls):
    """Reads the calls of a family; what stands between two calls of a section is nothing."""

    def __init__(self, marks: JsonMarks) -> None:
        super().__init__((marks.section, marks.begin))
        self._marks = marks
        self._extent = Extent()

    def call(self) -> bool:
        """Behind the beginning of a section, or of a call without one."""
        self.state = self._section if self._marker == self._marks.section else self._head
        return True

    def _section(self) -> bool:
        """Up to the next call of a section, or its end."""
        marks = self._marks
        found = first_marker(self.held[: MAX_HEAD_CHARS + len(marks.section_end)], (marks.begin, marks.section_end))
        if found is None and len(self.held) <= MAX_HEAD_CHARS and not self.final:
            return False
        if found is None:
            self._end_of_section()
            return True
        self.take(found[0] + len(found[1]))
        if found[1] == marks.begin:
            self._marker = marks.begin
            self.state = self._head
        else:
            self.state = self.content
        return True

    def _end_of_section(self) -> None:
        """No call follows; a section without any is content, unless the answer breaks off at its beginning."""
        if self._has_calls or (self.final and not self.held.strip()):
            self.take_all()
            self.state = self.content
        else:
            self.no_call()

    def _head(self) -> bool:
        begun = self.held[:MAX_HEAD_CHARS]
        head = self._marks.head.match(begun)
        if head is not None:
            self.found([CallBegin(head[1])])
            self.take(head.end())
            self._extent = Extent()
            self.state = self._arguments
            return True
        if "{" not in begun and len(begun) < MAX_HEAD_CHARS and not self.final:
            return False
        self.no_call()
        return True

    def _arguments(self) -> bool:
        length = self._extent.scan(self.held)
        if self.held:
            self.found([CallArguments(self.take(len(self.held) if length is None else length))])
        if length is not None:
            self.state = self._tail
        return length is not None

    def _tail(self) -> bool:
        self.skip_blank()
        marks = self._marks
        for marker in (*marks.closing, marks.section_end, marks.begin):
            begins = self.begins(marker)
            if begins is None:
                return False
            if begins:
                self.take(len(marker))
                self._marker = marker
                self.state = {marks.section_end: self.content, marks.begin: self._head}.get(marker, self._tail)
                return True
        self.state = self.content
        return True
