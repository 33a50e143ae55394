"""What clients ask of an answer's form becomes a grammar, or is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.core.params import MAX_GRAMMAR_CHARS
from paceline.gateway.api.openai.bodies import CompletionBody, parse_body
from paceline.gateway.api.openai.choices import grammar_of
from paceline.gateway.grammars.formats import grammar_of_json_schema, loosened
from paceline.gateway.http.fields import UnknownFields


def asked(**fields: Any) -> str:
    return grammar_of(parse_body(CompletionBody, {"prompt": "x", **fields}, UnknownFields(strict=False)))[0]


def refusal(**fields: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        asked(**fields)
    return caught.value


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **more}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": schema_format({"type": "object", "properties": {"a": {"const": None}}})},
        {"response_format": schema_format({"type": "object"}, strict=True, description=None)},
        {"structured_outputs": {"json": {"type": "integer"}}},
        {"structured_outputs": {"json": '{"type": "integer"}', "regex": None}},
        {"structured_outputs": {"json": {"type": "array"}, "whitespace_pattern": "[ ]?"}},
        {"structured_outputs": {"regex": "a+b"}},
        {"structured_outputs": {"choice": ["yes", 'no "quoted"', "völlig egal"]}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
        {"structured_outputs": {"json_object": True}},
    ],
)
def test_every_way_to_ask_makes_a_grammar(fields: dict[str, Any]) -> None:
    assert asked(**fields)


def test_whoever_asks_for_nothing_gets_none() -> None:
    assert asked() == asked(response_format={"type": "text"}) == asked(structured_outputs={}) == ""


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type", "must be one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object"),
        ({"response_format": schema_format(3)}, "response_format.json_schema.schema", "an object"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "must be a string"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "from 1 to"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice[1]", "must not be empty"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "excludes"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs.regex",
            "excludes response_format",
        ),
        (
            {"structured_outputs": {"regex": "a" * MAX_GRAMMAR_CHARS}},
            "structured_outputs.regex",
            "must have at most 131072 characters",
        ),
        (
            {"structured_outputs": {"json": {"enum": ["x" * 100] * 2000}}},
            "structured_outputs.json",
            "must have at most 131072 characters",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not JSON"),
        ({"guided_regex": "a"}, "guided_regex", "is not supported by this server; use structured_outputs.regex"),
    ],
)
def test_what_makes_no_grammar_is_refused_by_name(fields: dict[str, Any], field: str, problem: str) -> None:
    error = refusal(**fields)
    assert error.field == field
    assert problem in error.problem


def test_what_no_grammar_holds_is_left_out_of_a_loosened_schema() -> None:
    node = {"properties": {"next": {"$ref": "#"}, "word": {"pattern": r"\bx"}, "kept": {"pattern": "^y"}}}
    assert loosened({"type": "string"}, field="tools") == {"type": "string"}
    loose = loosened(node, field="tools")
    grammar = grammar_of_json_schema(loose, exact=False)
    assert '"^y"' in grammar
    assert "\\bx" not in grammar


@pytest.mark.parametrize(("strict", "kept"), [(False, False), (True, True), (None, True)])
def test_a_format_that_is_not_strict_ignores_what_no_grammar_holds(strict: bool | None, kept: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?!x)"}}}
    more = {} if strict is None else {"strict": strict}
    grammar = asked(response_format=schema_format(schema, **more))
    assert ("(?!x)" in grammar, '"lenient":true' in grammar.replace(" ", "")) == (kept, not kept)
