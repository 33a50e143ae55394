"""Where a message ends before its text does: at a stop string in its content, or after its only call."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.gateway.message.form import MessageReader
from paceline.gateway.message.parts import CallArguments, CallBegin, Content, Part, joined
from paceline.gateway.message.tool_calls.json_call import Extent
from paceline.gateway.text.stops import StopMatcher


class StoppingReader:
    """Reads a message up to its end. How its text is cut does not change the result.

    Args:
        reader: Reads the text.
        stops: Stop strings; none is searched within reasoning or a call, or across a call.
        include: Whether the stop string belongs to the content.
        one_call: Whether the message ends with its first call: with the JSON object of its arguments, or where
            arguments that are none are followed by something else.

    Attributes:
        stop: The stop string that ended it; None: none so far.
        over: Whether it has ended.
    """

    def __init__(self, reader: MessageReader, stops: Sequence[str], *, include: bool, one_call: bool = False) -> None:
        self.stop: str | None = None
        self.over = False
        self._reader = reader
        self._matcher = StopMatcher(stops)
        self._include = include
        self._one_call = one_call
        # Of the arguments of the only call; None: it has not begun.
        self._extent: Extent | None = None

    def feed(self, text: str, *, may_stop: bool = True) -> list[Part]:
        """Takes further text; returns what is certain by now. Nothing may be fed once the message is over.

        Args:
            may_stop: Whether a stop string that this text completes ends the message.
        """
        return self._up_to_end(self._reader.feed(text), may_stop)

    def finish(self, *, may_stop: bool = True) -> list[Part]:
        """Returns what was held back; nothing may be fed afterwards."""
        parts = self._up_to_end(self._reader.finish(), may_stop)
        return parts if self.over else joined([*parts, Content(self._matcher.flush())])

    def _up_to_end(self, parts: list[Part], may_stop: bool) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if self._extent is not None and not isinstance(part, CallArguments):
                self.over = True
            if self.over:
                break
            out += self._content(part, may_stop) if isinstance(part, Content) else self._of_call(part)
        return joined(out)

    def _content(self, part: Content, may_stop: bool) -> list[Part]:
        passed, self.stop = self._matcher.feed(part.text, may_match=may_stop)
        self.over = self.stop is not None
        return [Content(passed), Content(self.stop if self.stop is not None and self._include else "")]

    def _of_call(self, part: Part) -> list[Part]:
        if isinstance(part, CallBegin) and self._one_call:
            self._extent = Extent()
        elif isinstance(part, CallArguments) and self._extent is not None:
            length = self._extent.scan(part.text)
            self.over = length is not None
            part = CallArguments(part.text[:length])
        return [Content(self._matcher.flush()), part]
