"""Base of readers, which go through states over the text they hold.

Pure. A state takes text only when no further text can change what becomes of it. Reading is linear in the text: what a
state looks at again is bounded, and what was held back for a call that turns out to be none is not searched for others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from paceline.gateway.message.parts import Content, Part

State = Callable[[], bool]
# Longer text is read in pieces, since each piece that a state takes moves the rest of it.
MAX_PIECE_CHARS = 4096
# Of the head of a call, white space included, and of white space that may turn out to be none of the text.
MAX_HEAD_CHARS = 1024
# Of a call that is read once it is whole: one answer of a million beginnings of calls took a gateway minutes.
MAX_HELD_CHARS = 64 * 1024


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
        for at in range(0, len(text), MAX_PIECE_CHARS):
            # Only a local name refers to it, so that Python appends in place.
            held, self.held = self.held, ""
            held += text[at : at + MAX_PIECE_CHARS]
            self.held = held
            self._run()
        return self._given()

    def finish(self) -> list[Part]:
        """Returns what was held back; nothing may be fed afterwards."""
        self.final = True
        self._run()
        return self._given()

    def _run(self) -> None:
        while self.state():
            pass

    def _given(self) -> list[Part]:
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
    found = _any_of(markers).search(text) if markers else None
    return None if found is None else (found.start(), found[0])


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
