"""Makes grammars, as sessions carry them, of JSON schemas, patterns, choices and grammars in text.

Nothing is compiled here: a verifier does that for its own vocabulary, and refuses what cannot be compiled before the
first token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from paceline.core.errors import InvalidRequestError
from paceline.core.params import MAX_GRAMMAR_CHARS
from paceline.gateway.message.schemas import Json, definitions, whole, without

MAX_CHOICES = 1024
# As Python's `json.dumps` writes it: with a fixed layout, most of the syntax of an answer is forced.
LAYOUT: Mapping[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LOOSE: Mapping[str, Any] = {"lenient": True, "coerce_one_of": True}
# Pattern features that no grammar holds: look-around, back-references, the edges of words.
_BEYOND_GRAMMARS = re.compile(r"\(\?<?[=!]|\\[bBk1-9]")


def grammar_of_json_schema(
    schema: Mapping[str, Any], *, field: str = "schema", exact: bool = True, whitespace_pattern: str | None = None
) -> str:
    """Returns the grammar of a JSON schema's values, in the layout `LAYOUT` unless its `x-guidance` has another.

    Args:
        field: Name of the request field, for the error.
        exact: Whether keywords that no grammar can hold are refused; otherwise they are ignored, and `oneOf` means
            `anyOf`.
        whitespace_pattern: Regular expression of white space between the tokens of JSON; None: as in the layout.

    Raises:
        InvalidRequestError: It is too long or nested too deeply.
    """
    spaced = {"whitespace_flexible": True, "whitespace_pattern": whitespace_pattern}
    layout = LAYOUT if whitespace_pattern is None else spaced
    options: Any = {**layout, **({} if exact else LOOSE)}
    return _made(lambda: LLMatcher.grammar_from_json_schema(text_of(schema, field=field), defaults=options), field)


def loosened(schema: Mapping[str, Any], *, field: str) -> Json:
    """Returns a JSON schema without patterns that no grammar can hold and without references that lead nowhere.

    Args:
        field: Name of the request field, for the error.

    Raises:
        InvalidRequestError: It is nested too deeply, or its references take too long to follow.
    """
    defined = definitions(schema, "schema", field=field)
    for name, each in defined.items():
        defined[name] = without(each, _is_beyond_grammars, defined)
    return whole(defined["schema"], defined)


def _is_beyond_grammars(pattern: str) -> bool:
    return _BEYOND_GRAMMARS.search(pattern.replace(r"\\", "")) is not None


def grammar_of_regex(pattern: str, *, field: str = "regex") -> str:
    """Returns the grammar of the texts that a regular expression matches as a whole.

    Raises:
        InvalidRequestError: It is too long.
    """
    return _made(lambda: LLMatcher.grammar_from_regex(checked(pattern, field)), field)


def grammar_of_choices(choices: Sequence[str], *, field: str = "choice") -> str:
    """Returns the grammar of an output that is one of several texts.

    Raises:
        InvalidRequestError: There are none or too many, or one is empty.
    """
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidRequestError(field, f"must have from 1 to {MAX_CHOICES} entries, got {len(choices)}")
    for index, choice in enumerate(choices):
        if not choice:
            raise InvalidRequestError(f"{field}[{index}]", "must not be empty")
    # Lark writes strings as JSON does.
    return checked("start: " + " | ".join(map(json.dumps, choices)), field)


def grammar_of_lark(text: str, *, field: str = "grammar") -> str:
    """Returns the grammar of a text in Lark, or in llama.cpp's GBNF, or in llguidance's own JSON.

    Raises:
        InvalidRequestError: It is too long or cannot be read.
    """
    if checked(text, field).lstrip().startswith("{"):
        return text
    return _made(lambda: any_to_lark(text), field)


def _made(make: Any, field: str) -> str:
    try:
        return checked(make(), field)
    except InvalidRequestError:
        raise
    except Exception as error:  # a converter may raise anything
        raise InvalidRequestError(field, f"cannot be read: {error}") from error


def checked(text: str, field: str) -> str:
    """Returns the text of a grammar.

    Raises:
        InvalidRequestError: It is too long.
    """
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            field, f"must have at most {MAX_GRAMMAR_CHARS} characters as a grammar, got {len(text)}"
        )
    return text


def text_of(schema: Mapping[str, Any], *, field: str) -> str:
    """Returns a schema as text.

    Raises:
        InvalidRequestError: It is too long or nested too deeply.
    """
    try:
        return checked(json.dumps(schema), field)
    except (RecursionError, ValueError) as error:
        raise InvalidRequestError(field, f"cannot be read: {type(error).__name__}") from None
