"""Text that comes in pieces, and a reader that goes through states over what it holds of it.

Pure. A state takes text only when no further text can change what is to become of it.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.gateway.message.parts import Part

State = Callable[[], bool]


class StatefulReader:
    """Base of readers: a state takes from `held`, gives out `parts`, and says whether it got on.

    Attributes:
        held: Text that is not used yet.
        final: Whether no text will follow.
        parts: Given out with the next return.
        state: What goes on with the text.
    """

    def __init__(self, state: State) -> None:
        self.held = ""
        self.final = False
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

    def skip_blank(self) -> None:
        """Takes white space from the beginning of what is held."""
        self.held = self.held.lstrip()

    def begins(self, marker: str) -> bool | None:
        """Tells whether the held text begins with a marker; None: that depends on what follows."""
        if self.held.startswith(marker):
            return True
        return None if not self.final and marker.startswith(self.held) else False


def first_marker(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Returns where the first marker stands in a text, and which; None: there is none."""
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None, key=lambda each: (each[0], -len(each[1])))
