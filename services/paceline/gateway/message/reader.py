"""The parts of an answer's text, and the base of the readers that make them, which go through states.

Parts are content, reasoning and calls of tools, in the order of the text. Readers are pure. A state takes text only
when no further text can change what becomes of it. Reading is linear in the text: what a state looks at again is
bounded, and what was held back for a call that turns out to be none is not searched for others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby

from paceline.gateway.text.streaming import certain_len


@dataclass(frozen=True, slots=True)
class Content:
    """Further text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Further text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The model calls a tool."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Further text of the arguments, which together are one JSON object."""

    text: str


Part = Content | Reasoning | CallBegin | CallArguments


def content_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def joined(parts: list[Part]) -> list[Part]:
    """Returns the same with neighbours of one kind as one, and without empty text."""
    if len(parts) == 1 and (isinstance(parts[0], CallBegin) or parts[0].text):
        return parts
    out: list[Part] = []
    for _, alike in groupby((each for each in parts if isinstance(each, CallBegin) or each.text), type):
        first, *further = alike
        if isinstance(first, CallBegin):
            out += (first, *further)
        else:
            texts = [first.text, *(each.text for each in further if not isinstance(each, CallBegin))]
            out.append(type(first)("".join(texts)))
    return out


State = Callable[[], bool]
# Longer text is read in pieces, since each piece that a state takes moves the rest of it.
MAX_PIECE_CHARS = 4096
# Characters of a call's head, white space included, and of white space that may turn out to be none of the text.
MAX_HEAD_CHARS = 1024
# Characters of a call that is read once whole: an answer of a million call beginnings took a gateway minutes.
MAX_HELD_CHARS = 64 * 1024


class StatefulReader:
    """Makes parts of a text that comes in pieces; how it is cut does not change what they join to.

    A state takes from `held`, appends to `parts`, and returns whether it changed anything.

    Attributes:
        held: Text that is not used yet.
        final: Whether no text will follow.
        over: Whether the reader has found the end of what it reads; `held` is what follows.
        parts: Returned by the next call.
        state: The state that reads the text next.
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


class MarkedCalls(StatefulReader):
    """Reads content up to a marker, then a call with `call`, then content again.

    White space before a marker, and behind a call at the end of the text, is no content, unless it is very long.

    Args:
        markers: The beginnings of calls; none: all of the text is content.
    """

    def __init__(self, markers: tuple[str, ...]) -> None:
        super().__init__(self.content)
        self._markers = markers
        self._has_calls = False
        self._marker = self._blank_before = ""

    def call(self) -> bool:
        """State behind a marker, which is already taken; its last step returns to `content`."""
        raise NotImplementedError

    def content(self) -> bool:
        found = first_marker(self.held, self._markers)
        if found is not None:
            before = self.take(found[0])
            bare = _bare_len(before)
            self._give(before[:bare])
            self._blank_before = before[bare:]
            self._marker = self.take(len(found[1]))
            self.state = self.call
            return True
        length = len(self.held) if self.final else certain_len(self.held, self._markers)
        text = self.held[:length]
        bare = _bare_len(text)
        if not self.final:
            self._give(self.take(bare))
        elif bare or not self._has_calls:
            self._give(self.take(length))
        return False

    def no_call(self) -> None:
        """The text after the marker is no call: the marker and the white space before it are content, too."""
        self._give(self._blank_before + self._marker)
        self.state = self.content

    def found(self, parts: list[Part]) -> None:
        """Adds parts that a call consists of."""
        self._has_calls |= any(isinstance(each, CallBegin) for each in parts)
        self.parts += parts

    def _give(self, text: str) -> None:
        if text:
            self.parts.append(Content(text))


def _bare_len(text: str) -> int:
    """Returns the length of a text without the white space that it ends with."""
    return max(len(text.rstrip()), len(text) - MAX_HEAD_CHARS)
