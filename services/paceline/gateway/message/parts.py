"""The parts of an answer's text: content, reasoning and calls of tools, in the order of the text.

Arguments belong to the last call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
    """Returns the content alone."""
    return "".join(part.text for part in parts if isinstance(part, Content))


def joined(parts: list[Part]) -> list[Part]:
    """Returns the same with neighbours of one kind as one, and without empty text."""
    out: list[Part] = []
    for part in parts:
        if isinstance(part, CallBegin):
            out.append(part)
        elif part.text:
            last = out[-1] if out else None
            if last is not None and not isinstance(last, CallBegin) and type(last) is type(part):
                out[-1] = type(part)(last.text + part.text)
            else:
                out.append(part)
    return out
