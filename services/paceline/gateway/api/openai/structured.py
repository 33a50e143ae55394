"""The grammar that a request wants for its answer, in OpenAI's fields or in vLLM's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.openai.bodies import CommonBody
from paceline.gateway.grammars.formats import (
    grammar_of_choices,
    grammar_of_json_schema,
    grammar_of_lark,
    grammar_of_regex,
    loosened,
)

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_FORMATS = ("text", "json_object", "json_schema")
# A field that asks for a grammar, and what makes the grammar.
_Wanted = list[tuple[str, Callable[[], str]]]


def grammar_of(body: CommonBody) -> tuple[str, str]:
    """Returns the grammar that an answer must follow, and the field that asks for it; both empty: none does.

    Raises:
        InvalidRequestError: The grammar cannot be read, or the body gives more than one.
    """
    wanted = [*_response_format(body), *_structured_outputs(body), *_guided(body)]
    if not wanted:
        return "", ""
    (field, make), *others = wanted
    if others:
        raise InvalidRequestError(others[0][0], f"excludes {field}")
    return make(), field


def _response_format(body: CommonBody) -> _Wanted:
    given = body.response_format
    if given is None:
        return []
    kind = given.get("type")
    if kind not in _FORMATS:
        raise InvalidRequestError("response_format.type", f"must be one of {', '.join(_FORMATS)}, got {kind!r}")
    if kind == "text":
        return []
    if kind == "json_object":
        return [("response_format", partial(grammar_of_json_schema, _ANY_OBJECT, field="response_format"))]
    wrapper = given.get("json_schema")
    if not isinstance(wrapper, dict):
        raise InvalidRequestError("response_format.json_schema", "must be an object with a schema")
    field = "response_format.json_schema.schema"
    schema = _schema(wrapper.get("schema"), field)
    if wrapper.get("strict") is not False:
        return [(field, partial(grammar_of_json_schema, schema, field=field))]
    return [(field, lambda: grammar_of_json_schema(loosened(schema, field=field), field=field, exact=False))]


def _structured_outputs(body: CommonBody) -> _Wanted:
    given = {name: value for name, value in (body.structured_outputs or {}).items() if value is not None}
    pattern = given.pop("whitespace_pattern", None)
    if pattern is not None and not isinstance(pattern, str):
        raise InvalidRequestError("structured_outputs.whitespace_pattern", "must be a string")
    unknown = given.keys() - {"json", "regex", "choice", "grammar", "json_object"}
    if unknown:
        raise InvalidRequestError(f"structured_outputs.{min(unknown)}", "is not supported by this server")
    return [
        (f"structured_outputs.{name}", _maker(name, f"structured_outputs.{name}", value, pattern))
        for name, value in given.items()
        if value is not False
    ]


def _guided(body: CommonBody) -> _Wanted:
    return [
        (f"guided_{name}", _maker(name, f"guided_{name}", value, None))
        for name in ("json", "regex", "choice", "grammar")
        if (value := getattr(body, f"guided_{name}")) is not None
    ]


def _maker(name: str, field: str, value: Any, whitespace_pattern: str | None) -> Callable[[], str]:
    if name in ("json", "json_object"):
        schema = _ANY_OBJECT if name == "json_object" else _schema(value, field)
        return partial(grammar_of_json_schema, schema, field=field, whitespace_pattern=whitespace_pattern)
    if name == "choice":
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InvalidRequestError(field, "must be a list of strings")
        return partial(grammar_of_choices, value, field=field)
    if not isinstance(value, str):
        raise InvalidRequestError(field, "must be a string")
    return partial(grammar_of_regex if name == "regex" else grammar_of_lark, value, field=field)


def _schema(value: Any, field: str) -> Mapping[str, Any]:
    """Returns a schema that is given as an object or as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise InvalidRequestError(field, "must be a JSON schema, but is not JSON") from None
    if not isinstance(value, dict):
        raise InvalidRequestError(field, "must be a JSON schema: an object")
    return value
