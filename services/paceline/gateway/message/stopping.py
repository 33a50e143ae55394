"""Stop strings of a message: they end it where its content holds one, never within its reasoning or a call."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.gateway.message.form import MessageReader
from paceline.gateway.message.parts import Content, Part, joined
from paceline.gateway.text.stops import StopMatcher


class StoppingReader:
    """Reads a message up to the first stop string in its content. How its text is cut does not change the result.

    Args:
        reader: Reads the text.
        stops: Stop strings; none is searched across a call.
        include: Whether the stop string belongs to the content.

    Attributes:
        stop: The stop string that ended it; None: none so far.
    """

    def __init__(self, reader: MessageReader, stops: Sequence[str], *, include: bool) -> None:
        self.stop: str | None = None
        self._reader = reader
        self._matcher = StopMatcher(stops)
        self._include = include

    def feed(self, text: str, *, may_stop: bool = True) -> list[Part]:
        """Takes further text; returns what is certain by now. Nothing may be fed after a stop string.

        Args:
            text: The text.
            may_stop: Whether a stop string that this text completes ends the message.
        """
        return self._up_to_stop(self._reader.feed(text), may_stop)

    def finish(self, *, may_stop: bool = True) -> list[Part]:
        """Returns what was held back; nothing may be fed afterwards."""
        parts = self._up_to_stop(self._reader.finish(), may_stop)
        return parts if self.stop is not None else joined([*parts, Content(self._matcher.flush())])

    def _up_to_stop(self, parts: list[Part], may_stop: bool) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if not isinstance(part, Content):
                out += [Content(self._matcher.flush()), part]
                continue
            passed, self.stop = self._matcher.feed(part.text, may_match=may_stop)
            out.append(Content(passed))
            if self.stop is not None:
                out.append(Content(self.stop if self._include else ""))
                break
        return joined(out)
