"""The types that a bare value may have are those of its schema, however it says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.openai.tools import read_toolbox
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.message.form import QWEN3_CODER, MessageForm
from paceline.gateway.message.parts import CallArguments
from paceline.gateway.message.schemas import definitions, types_of
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
