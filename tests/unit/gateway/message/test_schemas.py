"""The types that a bare value may have are those of its schema, however it says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.openai.tools import read_toolbox
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.message.form import QWEN3_CODER, MessageForm
from paceline.gateway.message.reader import CallArguments
from paceline.gateway.message.schemas import MAX_REFERENCE_CHARS, definitions, parts, types_of
from paceline.gateway.message.tools import Toolbox

DEFINED = {
    "text": {"type": "string"},
    "loop": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/loop"}]},
    "number": {"$anchor": "n", "type": "number"},
}


def toolbox(parameters: dict[str, Any]) -> Toolbox:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return read_toolbox([tool], "auto", True, UnknownFields(strict=False))


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123", "123"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", "None"),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["string", "null"]}, '"quoted"', '"quoted"'),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "integer"]}, "7.5", "7.5"),
        ({"$ref": "#/$defs/text"}, "55", "55"),
        ({"$ref": "#/$defs/loop"}, "55", "55"),
        ({"$ref": "#/properties/twin"}, "55", "55"),
        ({"$ref": "#n"}, "55", 55),
        ({"enum": ["99", "100"]}, "99", "99"),
        ({"const": "1"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/text"}, {"minLength": 1}]}, "1", "1"),
        ({"oneOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "integer"}, "True", True),
        ({"type": "number"}, "3", 3),
        ({"type": "magic"}, "3", 3),
        ({"$ref": "https://example.org/elsewhere"}, "3", 3),
        ({}, '"quoted"', "quoted"),
        (True, "[1]", [1]),
    ],
)
def test_a_bare_value_is_read_as_its_schema_allows(schema: Any, written: str, value: Any) -> None:
    """vLLM PR #38973 and #46924: a string of digits stays a string where the schema is no plain `type`."""
    tools = toolbox({"type": "object", "properties": {"p": schema, "twin": {"type": "string"}}, "$defs": DEFINED})
    reader = MessageForm(tool_calls=QWEN3_CODER, types=tools.types).reader()
    text = f"<tool_call>\n<function=f>\n<parameter=p>\n{written}\n</parameter>\n</function>\n</tool_call>"
    parts = [*reader.feed(text), *reader.finish()]
    read = json.loads("".join(part.text for part in parts if isinstance(part, CallArguments)))
    assert (read, type(read["p"])) == ({"p": value}, type(value))


def test_definitions_that_refer_to_one_another_many_times_are_looked_at_once() -> None:
    chain: dict[str, Any] = {
        f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}, {"$ref": f"#/$defs/d{at + 1}"}]} for at in range(60)
    }
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d60": {"type": "string"}}}
    defined = definitions(schema, "x", field="tools")
    assert types_of(defined["x"], defined) == {"string"}


def test_a_schema_that_is_nested_too_deeply_is_refused_by_name() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequestError, match="tools: holds a schema that is nested too deeply"):
        _ = toolbox({"type": "object", "properties": {"p": deep}}).types


def num_schemas(schema: Any) -> int:
    return isinstance(schema, dict) + sum(map(num_schemas, parts(schema)))


def nested(depth: int) -> dict[str, Any]:
    """Schemas within one another, each of which is referred to."""
    schema: dict[str, Any] = {"type": "string"}
    for at in range(depth):
        schema = {"$anchor": f"a{at}", "properties": {"in": schema, "again": {"$ref": f"#a{max(0, at - 1)}"}}}
    return schema


def test_what_is_referred_to_is_copied_once_however_deep_it_stands() -> None:
    """The innermost of 100 such schemas was copied 100 times, with all of its references: for hours, of 4 MiB."""
    for depth in (10, 100):
        schema = nested(depth)
        defined = definitions(schema, "x", field="tools")
        assert sum(map(num_schemas, defined.values())) <= 2 * num_schemas(schema)


def test_what_is_referred_to_from_outside_of_schemas_is_looked_at_once_however_often() -> None:
    """Each of these references leads one level higher, and all to the same wide schema in the end."""
    schema: dict[str, Any] = {"anyOf": [{"type": "string"} for _ in range(50)]}
    for _ in range(60):
        schema = {"not": schema}
    refs = [{"$ref": "#/x" + "/not" * depth} for depth in range(59, 0, -1)]
    assert definitions({"x": schema, "allOf": refs}, "x", field="tools").num_schemas <= 250


def test_references_that_lead_through_many_others_take_a_bounded_number_of_steps() -> None:
    chain = {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}]} for at in range(200)}
    names = {f"p{at}": {"$ref": "#/$defs/d0"} for at in range(2000)}
    tools = toolbox({"type": "object", "properties": names, "$defs": {**chain, "d200": {"type": "string"}}})
    with pytest.raises(InvalidRequestError, match=r"tools: holds a schema of \d+ whose references take more than"):
        _ = tools.types
    fewer = toolbox({"type": "object", "properties": dict(list(names.items())[:20]), "$defs": chain})
    assert len(fewer.types["f"]) == 20


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/" + "a/" * MAX_REFERENCE_CHARS},
        {"$id": "https://a.example/" + "b" * MAX_REFERENCE_CHARS},
        {"$id": "https://a.example/" + "b" * 2000, "items": {"$ref": "#" + "c" * 100}},
    ],
)
def test_a_reference_that_is_too_long_is_refused(schema: dict[str, Any]) -> None:
    """Each of 100,000 references to a name of megabytes was joined with it."""
    with pytest.raises(InvalidRequestError, match=r"tools: holds a reference of \d+ characters, at most 2048"):
        definitions(schema, "x", field="tools")
