"""Calls as Mistral writes them: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, or `[TOOL_CALLS]name{...}` each."""

from __future__ import annotations

import re

from paceline.gateway.message.parts import CallArguments, CallBegin
from paceline.gateway.message.tool_calls.json_call import Extent
from paceline.gateway.message.tool_calls.json_list import JsonList
from paceline.gateway.message.tool_calls.marked import MarkedCalls

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:-]{1,256}")
_HEAD = re.compile(r"([\w.:-]{1,256})(?:\[CALL_ID\]\w{0,64})?(?:\[ARGS\])?\s*(?=\{)")
MAX_HEAD_CHARS = 512


class MistralCalls(MarkedCalls):
    """Reads them."""

    def __init__(self) -> None:
        super().__init__((BEGIN,))
        self._list = JsonList()
        self._extent = Extent()

    def call(self) -> bool:
        """Reads what follows the marker: an array, or a name."""
        bare = self.held.lstrip()
        if bare.startswith("["):
            self._list = JsonList()
            self.state = self._in_list
            return True
        if not bare and not self.final:
            return False
        head = _HEAD.match(bare)
        if head is not None:
            self.found([CallBegin(head[1])])
            self.held = bare[head.end() :]
            self._extent = Extent()
            self.state = self._arguments
            return True
        if self.final or not _may_become_head(bare):
            self.no_call()
            return True
        return False

    def _in_list(self) -> bool:
        parts = self.through(self._list)
        if self._list.over and not self._list.num_calls:
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


def _may_become_head(text: str) -> bool:
    """Tells whether name and arguments may still follow."""
    if len(text) > MAX_HEAD_CHARS:
        return False
    name = _NAME.match(text)
    if name is None:
        return False
    rest = text[name.end() :]
    if rest.startswith(CALL_ID):
        rest = rest[len(CALL_ID) :].lstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
    if rest.startswith(ARGS):
        rest = rest[len(ARGS) :]
        return not rest.strip()
    return not rest.strip() or any(marker.startswith(rest) for marker in (CALL_ID, ARGS))
