"""Calls between special tokens, each a name and an object: one reader, and the tokens of each family as data.

The object is JSON, or has bare keys, and strings between tokens: `{city:<|"|>Paris<|"|>,days:[1,2]}`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from paceline.gateway.message.reader import (
    MAX_HEAD_CHARS,
    CallArguments,
    CallBegin,
    MarkedCalls,
    StatefulReader,
    first_marker,
)
from paceline.gateway.message.tool_calls.json_call import BracketScanner
from paceline.gateway.message.tool_calls.tagged import bare_value
from paceline.gateway.text.streaming import certain_len

# Structure of an object with bare keys, and how JSON is written here.
_STRUCTURE = {"{": "{", "}": "}", "[": "[", "]": "]", ":": ": ", ",": ", "}


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonMarks:
    """The tokens of a family.

    Attributes:
        section: Begins a list of calls, and may be missing; the same as `begin`: there are no lists.
        begin: Begins a call.
        head: From there to the object of its arguments; its first group is the name.
        section_end: Ends a list of calls, or a call without one; empty: nothing does.
        closing: May stand behind the object, in any order.
        inner: Further special tokens within a head.
        quote: Special token around strings, where keys are bare; empty: the object is JSON.
    """

    section: str
    begin: str
    head: re.Pattern[str]
    section_end: str = ""
    closing: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    quote: str = ""

    @property
    def tokens(self) -> tuple[str, ...]:
        """All special tokens that a reader must see."""
        return tuple(filter(None, (self.section, self.section_end, self.begin, *self.closing, *self.inner, self.quote)))


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
# Gemma 4: `call:NAME{...}`.
GEMMA4_MARKS = JsonMarks(
    section="<|tool_call>",
    section_end="<tool_call|>",
    begin="<|tool_call>",
    head=re.compile(r"\s*call:([\w.:-]{1,256})\s*(?=\{)"),
    quote='<|"|>',
)


class JsonObject(StatefulReader):
    """Reads one object up to its end."""

    def __init__(self) -> None:
        super().__init__(self._object)
        self._extent = BracketScanner()

    def _object(self) -> bool:
        length = self._extent.scan(self.held)
        self.parts.append(CallArguments(self.take(len(self.held) if length is None else length)))
        if length is not None:
            self.over = True
            self.state = lambda: False
        return False


class BareKeysObject(StatefulReader):
    """Reads one object with bare keys up to its end, and writes it as JSON.

    Args:
        quote: Marker around strings; they hold no escapes.
    """

    def __init__(self, quote: str) -> None:
        super().__init__(self._between)
        self._quote = quote
        self._ends_word = re.compile(rf"[\[\]{{}}:,]|{re.escape(quote)}")
        self._depth = 0

    def _between(self) -> bool:
        """Outside of strings."""
        self.skip_blank()
        begins = self.begins(self._quote)
        if begins:
            self.take(len(self._quote))
            self._write('"')
            self.state = self._string
        elif self.held[:1] in _STRUCTURE:
            self._structure(self.take(1))
        else:
            return begins is False and self._word()
        return True

    def _structure(self, mark: str) -> None:
        self._write(_STRUCTURE[mark])
        self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark, 0)
        if not self._depth:
            self.over = True
            self.state = lambda: False

    def _word(self) -> bool:
        """Writes a key, a number or a constant; one that the answer breaks off within is nothing."""
        end = self._ends_word.search(self.held, 0, MAX_HEAD_CHARS)
        if end is None and len(self.held) < MAX_HEAD_CHARS:
            self.take(len(self.held) if self.final else 0)
            return False
        word = self.take(MAX_HEAD_CHARS if end is None else end.start()).strip()
        is_key = end is not None and end[0] == ":"
        self._write(json.dumps(word, ensure_ascii=False) if is_key else bare_value(word, ()))
        return True

    def _string(self) -> bool:
        end = self.held.find(self._quote)
        certain = len(self.held) if self.final else certain_len(self.held, (self._quote,))
        self._write(json.dumps(self.take(certain if end < 0 else end), ensure_ascii=False)[1:-1])
        if end >= 0:
            self.take(len(self._quote))
            self._write('"')
            self.state = self._between
        return end >= 0

    def _write(self, text: str) -> None:
        self.parts.append(CallArguments(text))


class MarkedJsonCalls(MarkedCalls):
    """Reads the calls of a family; what stands between two calls of a section is nothing."""

    def __init__(self, marks: JsonMarks) -> None:
        super().__init__((marks.section, marks.begin))
        self._marks = marks
        self._object: StatefulReader = JsonObject()

    def call(self) -> bool:
        """Behind the beginning of a section, or of a call without one."""
        self.state = self._head if self._marker == self._marks.begin else self._section
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
            self._object = BareKeysObject(self._marks.quote) if self._marks.quote else JsonObject()
            self.state = self._arguments
            return True
        if "{" not in begun and len(begun) < MAX_HEAD_CHARS and not self.final:
            return False
        if self.final and not begun.strip():
            # The answer breaks off behind a special token, which nobody is to see.
            self.take_all()
            self.state = self.content
        else:
            self.no_call()
        return True

    def _arguments(self) -> bool:
        self.found(self.through(self._object))
        if self._object.over:
            self.state = self._tail
        return self._object.over

    def _tail(self) -> bool:
        self.skip_blank()
        marks = self._marks
        for marker in filter(None, (*marks.closing, marks.section_end, marks.begin)):
            begins = self.begins(marker)
            if begins is None:
                return False
            if begins:
                self.take(len(marker))
                self._marker = marker
                self.state = {marks.section_end: self.content, marks.begin: self.call}.get(marker, self._tail)
                return True
        self.state = self.content
        return True
