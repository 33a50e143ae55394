"""Fields of JSON objects that strangers wrote: their types and ranges, and a line about the first that does not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.core.errors import ConfigError, shortened

MAX_VALUE_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes:
        wanted: What it is, to follow "must be".
        fits: Whether a value is one.
    """

    wanted: str
    fits: Callable[[Any], bool]

    def __or__(self, other: Kind) -> Kind:
        return Kind(f"{self.wanted} or {other.wanted}", lambda value: self.fits(value) or other.fits(value))


Kinds = Mapping[str, Kind]


def whole(low: int, high: int) -> Kind:
    """A whole number between two, inclusively."""
    return Kind(f"a whole number from {low:,} to {high:,}", lambda value: type(value) is int and low <= value <= high)


def number(low: float, high: float) -> Kind:
    """A number between two, inclusively."""
    return Kind(
        f"a number from {low:g} to {high:g}",
        lambda value: type(value) in (int, float) and math.isfinite(value) and low <= value <= high,
    )


def listed(of: Kind, plural: str) -> Kind:
    return Kind(f"a list of {plural}", lambda value: isinstance(value, list) and all(map(of.fits, value)))


def holding(**fields: Kind) -> Kind:
    """An object that has these fields, among others."""
    names = " and ".join(fields)
    return Kind(
        f"an object with {names}",
        lambda value: isinstance(value, dict) and all(kind.fits(value.get(name)) for name, kind in fields.items()),
    )


BOOLEAN: Final = Kind("true or false", lambda value: isinstance(value, bool))
TEXT: Final = Kind("text", lambda value: isinstance(value, str))
OBJECT: Final = Kind("an object", lambda value: isinstance(value, dict))
NULL: Final = Kind("null", lambda value: value is None)


def problem(content: Mapping[str, Any], kinds: Kinds, where: object, required: tuple[str, ...] = ()) -> str:
    """What is wrong with an object, in one line that names the place, the field and the value; empty: nothing.

    Args:
        kinds: Of its fields; others may be anything.
        where: File, or file and place in it.
        required: Fields that must be there.
    """
    for name in required:
        if name not in content:
            return f"{where}: {name} is missing; it must be {kinds[name].wanted}"
    for name, kind in kinds.items():
        if name in content and not kind.fits(content[name]):
            value = shortened(json.dumps(content[name], ensure_ascii=True), MAX_VALUE_CHARS)
            return f"{where}: {name} must be {kind.wanted}, got {value}"
    return ""


def check(content: Mapping[str, Any], kinds: Kinds, where: object, required: tuple[str, ...] = ()) -> None:
    """Refuses an object with a `problem`.

    Raises:
        ConfigError: Says which.
    """
    if found := problem(content, kinds, where, required):
        raise ConfigError(found)
