"""Base of readers, which go through states over the text they hold.

Pure. A state takes text only when no further text can change what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.gateway.message.parts import Content, Part

State = Callable[[], bool]


class StatefulReader:
    """Makes parts of a text that comes in pieces; how it is cut does not change what they join to.

    A state takes from `held`, appends to `parts`, and returns whether it changed anything.

    Attributes:
        held: Text that is not used yet.
        final: Whether no text will follow.
        over: Whether the reader has found the end of what it reads; `held` is what follows.
        parts: Returned by the next call.
        state: What reads the text next.
    """

    def __init__(self, state: State) -> None:
        self.held = ""
        self.final = False
        self.over = False
        self.parts: list[Part] = []
        self.state = state

    def feed(self, text: str) -> list[Part]:
        """Takes further text; returns what is certain by now."""
        self.held += text
        return self._run()

    def finish(self) -> list[Part]:
        """Returns what was held back; nothing may be fed afterwards."""
        self.final = True
        return self._run()

    def _run(self) -> list[Part]:
        while self.state():
            pass
        parts, self.parts = self.parts, []
        return parts

    def take(self, length: int) -> str:
        """Takes text from the beginning of what is held."""
        taken, self.held = self.held[:length], self.held[length:]
        return taken

    def take_all(self) -> str:
        """Takes all that is held."""
        return self.take(len(self.held))

    def skip_blank(self) -> None:
        """Takes white space from the beginning of what is held."""
        self.held = self.held.lstrip()

    def begins(self, marker: str) -> bool | None:
        """Tells whether the held text begins with a marker; None: that depends on what follows."""
        if self.held.startswith(marker):
            return True
        return None if not self.final and marker.startswith(self.held) else False

    def pass_marker(self, marker: str, then: State) -> bool:
        """Takes a marker that may be missing, and white space before it; then another state follows."""
        self.skip_blank()
        begins = self.begins(marker)
        if begins is not None:
            self.take(len(marker) if begins else 0)
            self.state = then
        return begins is not None

    def through(self, inner: StatefulReader) -> list[Part]:
        """Lets another reader read on; takes back what it leaves when it is over."""
        parts = inner.feed(self.take_all())
        if self.final and not inner.over:
            parts += inner.finish()
        if inner.over:
            self.held = inner.held
        return parts

    def rest_is_content(self) -> bool:
        """Last state: all further text is content."""
        self.parts.append(Content(self.take_all()))
        return False


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Returns where the first marker of a text is, and which it is; None: there is none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None, key=lambda each: (each[0], -len(each[1])))
