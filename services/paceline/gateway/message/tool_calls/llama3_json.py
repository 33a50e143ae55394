"""Calls as Llama 3 writes them: `{"name": ..., "parameters": {...}}` and nothing else, several joined by semicolons."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.gateway.message.tool_calls.json_list import ListOnly

BEGIN = "<|python_tag|>"


class Llama3Calls(ListOnly):
    """Reads them; the special token that may stand before them is not content.

    Args:
        only: See `JsonCall`.
    """

    def __init__(self, only: Sequence[str] = ()) -> None:
        super().__init__(opening="", separator=";", closing="", only=only)
        self.state = self._tag

    def _tag(self) -> bool:
        if not self._take_blank():
            return True
        begins = self.begins(BEGIN)
        if begins is not None:
            self._before += self.take(len(BEGIN) if begins else 0)
            self.state = self._open
        return begins is not None
