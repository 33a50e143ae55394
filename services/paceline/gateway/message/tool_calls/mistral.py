"""Calls as Mistral writes them: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name{...}` each."""

from __future__ import annotations

import re

from paceline.gateway.message.parts import CallArguments, CallBegin
from paceline.gateway.message.reader import MAX_HEAD_CHARS
from paceline.gateway.message.tool_calls.json_call import Extent
from paceline.gateway.message.tool_calls.json_list import JsonList
from paceline.gateway.message.tool_calls.marked import MarkedCalls

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_HEAD_BEGIN = re.compile(r"([\w.:-]{1,256})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\]\s*|\s*)")


class MistralCalls(MarkedCalls):
    """Reads them."""

    def __init__(self) -> None:
        super().__init__((BEGIN,))
        self._list = JsonList()
        self._extent = Extent()

    def call(self) -> bool:
        """Reads what follows the marker: an array, or a name."""
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
        self.no_call()
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
