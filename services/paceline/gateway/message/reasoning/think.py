"""Reasoning between `<think>` and `</think>` at the beginning of an answer, as Qwen3 and DeepSeek-R1 write it."""

from __future__ import annotations

from paceline.gateway.message.held_text import StatefulReader
from paceline.gateway.message.parts import Content, Reasoning
from paceline.gateway.text.stops import certain_len

BEGIN, END = "<think>", "</think>"


class ThinkReader(StatefulReader):
    """Tells reasoning from content; line breaks at the edges of both belong to the tags.

    Args:
        open_already: Whether the answer begins within the reasoning, since the prompt ends with its tag.
    """

    def __init__(self, *, open_already: bool) -> None:
        super().__init__(self._inside_begin if open_already else self._begin)

    def _begin(self) -> bool:
        bare = self.held.lstrip()
        if bare.startswith(BEGIN):
            self.held = bare[len(BEGIN) :]
            self.state = self._inside
            return True
        if BEGIN.startswith(bare) and not self.final:
            return False
        self.state = self._content
        return True

    def _inside_begin(self) -> bool:
        """A model may repeat the tag that the prompt ends with."""
        bare = self.held.lstrip()
        if BEGIN.startswith(bare) and not self.final:
            return False
        self.held = bare.removeprefix(BEGIN)
        self.state = self._inside
        return True

    def _inside(self) -> bool:
        self.held = self.held.lstrip("\n")
        if not self.held:
            return False
        self.state = self._reasoning
        return True

    def _reasoning(self) -> bool:
        at = self.held.find(END)
        if at >= 0:
            self.parts.append(Reasoning(self.take(at).rstrip("\n")))
            self.take(len(END))
            self.state = self._after
            return True
        length = len(self.held)
        if not self.final:
            length = len(self.held[: certain_len(self.held, (END,))].rstrip("\n"))
        self.parts.append(Reasoning(self.take(length)))
        return False

    def _after(self) -> bool:
        self.held = self.held.lstrip("\n")
        if not self.held:
            return False
        self.state = self._content
        return True

    def _content(self) -> bool:
        self.parts.append(Content(self.take(len(self.held))))
        return False
