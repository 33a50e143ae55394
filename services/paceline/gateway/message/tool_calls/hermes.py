r"""Calls as Hermes and Qwen write them: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`."""

from __future__ import annotations

from paceline.gateway.message.tool_calls.json_call import JsonCall
from paceline.gateway.message.tool_calls.marked import MarkedCalls

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesCalls(MarkedCalls):
    """Reads them."""

    def __init__(self) -> None:
        super().__init__((BEGIN,))
        self._call: JsonCall | None = None
        self._blank = ""

    def call(self) -> bool:
        """Behind the marker: white space, then an object."""
        if self._call is None:
            bare = len(self.held) - len(self.held.lstrip())
            self._blank += self.take(bare)
            if not self.held and not self.final:
                return False
            self._call = JsonCall()
        text, self.held = self.held, ""
        self.found(self._call.feed(text))
        if self.final and not self._call.over:
            self.found(self._call.finish())
        if not self._call.over:
            return False
        self.held, failed = self._call.held, self._call.failed
        blank, self._blank, self._call = self._blank, "", None
        if failed:
            self.held = blank + self.held
            self.no_call()
        else:
            self.state = self._end
        return True

    def _end(self) -> bool:
        """Behind the object; a missing end is forgiven."""
        self.skip_blank()
        begins = self.begins(END)
        if begins is not None:
            self.take(len(END) if begins else 0)
            self.state = self.content
        return begins is not None
