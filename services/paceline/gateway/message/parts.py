"""The parts of an answer's text: content, reasoning and calls of tools, in the order of the text.

Arguments belong to the last call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


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
    for _, alike in groupby((each for each in parts if isinstance(each, CallBegin) or each.text), type):
        first, *further = alike
        if isinstance(first, CallBegin):
            out += (first, *further)
        else:
            texts = [first.text, *(each.text for each in further if not isinstance(each, CallBegin))]
            out.append(type(first)("".join(texts)))
    return out
