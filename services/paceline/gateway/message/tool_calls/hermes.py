r"""Calls as Hermes and Qwen write them: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`."""

from __future__ import annotations

from paceline.gateway.message.tool_calls.json_call import JsonCall
from paceline.gateway.message.tool_calls.marked import MarkedCalls

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesCalls(MarkedCalls):
    """Reads them."""

    def __init__(self) -> None:
        super().__init__((BEGIN,))
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
        return self.pass_marker(END, self.content)
