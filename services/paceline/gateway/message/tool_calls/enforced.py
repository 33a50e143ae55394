"""Calls that a grammar has enforced: of one named tool its arguments alone, of any an array of JSON objects."""

from __future__ import annotations

from paceline.gateway.message.held_text import StatefulReader
from paceline.gateway.message.parts import CallArguments, CallBegin


class NamedCall(StatefulReader):
    """A text that is the arguments of a tool.

    Args:
        name: Of the tool.
    """

    def __init__(self, name: str) -> None:
        super().__init__(self._begin)
        self._name = name

    def _begin(self) -> bool:
        self.skip_blank()
        if self.held:
            self.parts.append(CallBegin(self._name))
            self.state = self._arguments
        return bool(self.held)

    def _arguments(self) -> bool:
        self.parts.append(CallArguments(self.take(len(self.held))))
        return False
