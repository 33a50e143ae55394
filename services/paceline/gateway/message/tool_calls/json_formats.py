"""Calls written as JSON objects, by the families of models that write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.gateway.message.reader import MAX_HEAD_CHARS, MarkedCalls
from paceline.gateway.message.tool_calls.json_call import JsonCall, JsonList, ListOnly
from paceline.gateway.message.tool_calls.marked_json import JsonMarks, MarkedJsonCalls

HERMES_BEGIN, HERMES_END = "<tool_call>", "</tool_call>"


class HermesCalls(MarkedCalls):
    r"""As Hermes and Qwen write them: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`."""

    def __init__(self) -> None:
        super().__init__((HERMES_BEGIN,))
        self._call = JsonCall()

    def call(self) -> bool:
        """Reads the object behind the marker; a missing end is forgiven."""
        parts = self.through(self._call)
        if self._call.failed:
            self.no_call()
        self.found(parts)
        if not self._call.over:
            return False
        if not self._call.failed:
            self.state = self._end
        self._call = JsonCall()
        return True

    def _end(self) -> bool:
        return self.pass_marker(HERMES_END, self.content)


LLAMA3_BEGIN = "<|python_tag|>"


class Llama3Calls(ListOnly):
    """As Llama 3 writes them: `{"name": ..., "parameters": {...}}` and nothing else, several joined by semicolons.

    The special token that may stand before them is not content.

    Args:
        only: See `JsonCall`.
    """

    def __init__(self, only: Sequence[str] = ()) -> None:
        super().__init__(opening="", separator=";", closing="", only=only)
        self.state = self._tag

    def _tag(self) -> bool:
        if not self._take_blank():
            return True
        begins = self.begins(LLAMA3_BEGIN)
        if begins is not None:
            self._before += self.take(len(LLAMA3_BEGIN) if begins else 0)
            self.state = self._open
        return begins is not None


MISTRAL_BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MISTRAL_MARKS = JsonMarks(
    section=MISTRAL_BEGIN,
    begin=MISTRAL_BEGIN,
    head=re.compile(r"\s*([\w.:-]{1,256})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s*(?=\{)"),
    inner=(CALL_ID, ARGS),
)


class MistralCalls(MarkedJsonCalls):
    """As Mistral writes them: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name{...}` each."""

    def __init__(self) -> None:
        super().__init__(MISTRAL_MARKS)
        self._list = JsonList()

    def call(self) -> bool:
        bare = self.held[:MAX_HEAD_CHARS].lstrip()
        if bare.startswith("["):
            self._list = JsonList()
            self.state = self._in_list
            return True
        may_follow = not bare and len(self.held) < MAX_HEAD_CHARS and not self.final
        return not may_follow and super().call()

    def _in_list(self) -> bool:
        parts = self.through(self._list)
        if self._list.over and not self._list.num_calls:
            # Its parts are the text that was looked at.
            self.no_call()
        elif self._list.over:
            self.state = self.content
        self.found(parts)
        return self._list.over
