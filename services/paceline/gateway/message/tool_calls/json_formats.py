"""Calls written as JSON objects, by the families of models that write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.gateway.message.reader import MAX_HEAD_CHARS, CallArguments, CallBegin, MarkedCalls
from paceline.gateway.message.tool_calls.json_call import Extent, JsonCall, JsonList, ListOnly

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
_HEAD_BEGIN = re.compile(r"([\w.:-]{1,256})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\]\s*|\s*)")


class MistralCalls(MarkedCalls):
    """As Mistral writes them: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name{...}` each."""

    def __init__(self) -> None:
        super().__init__((MISTRAL_BEGIN,))
        self._list = JsonList()
        self._extent = Extent()

    def call(self) -> bool:
        begun = self.held[:MAX_HEAD_CHARS]
        bare = begun.lstrip()
        if bare.startswith("["):
            self._list = JsonList()
            self.state = self._in_list
            return True
        head = _HEAD_BEGIN.match(bare)
        rest = bare if head is None else bare[head.end() :]
        if head is not None and rest.startswith("{"):
            self.found([CallBegin(head[1])])
            self.take(len(begun) - len(rest))
            self._extent = Extent()
            self.state = self._arguments
            return True
        # A marker of the head may have begun.
        open_yet = not rest or (head is not None and any(each.startswith(rest) for each in (CALL_ID, ARGS)))
        if open_yet and len(begun) < MAX_HEAD_CHARS and not self.final:
            return False
        if bare or not self.final:
            self.no_call()
        else:
            # The answer breaks off behind a special token, which nobody is to see.
            self.state = self.content
        return True

    def _in_list(self) -> bool:
        parts = self.through(self._list)
        if self._list.over and not self._list.num_calls:
            # Its parts are the text that was looked at.
            self.no_call()
        elif self._list.over:
            self.state = self.content
        self.found(parts)
        return self._list.over

    def _arguments(self) -> bool:
        length = self._extent.scan(self.held)
        if self.held:
            self.found([CallArguments(self.take(len(self.held) if length is None else length))])
        if length is not None:
            self.state = self.content
        return length is not None
