"""Hostile bodies of tools, grammars and messages, as bytes on a connection: for chats and for both newer APIs.

Some are wrong in one point, some are right bodies with one of their values exchanged for any other, and may be right
still. Accepted bodies ask for one token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from loadtest.bad.kinds import Kind, junk, posted

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
# Grammars that take all of the time that one may take, one after another: rare, or nothing else would be measured.
RARELY = 0.004
MAX_DEPTH = 4
# Fields of every body of an endpoint.
FIELDS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    RESPONSES: {"max_output_tokens": 1, "store": False},
    MESSAGES: {"max_tokens": 1},
    COUNT: {"max_tokens": 1},
}
Json = Any

# In the demo pair's vocabulary.
_LETTER_A = 69
_USER = {"role": "user", "content": "x"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def _text(text: str, kind: str = "text") -> list[Json]:
    return [{"type": kind, "text": text}]


def _tool(**function: Json) -> Json:
    return {"type": "function", "function": {"name": "f", **function}}


_TOOL = _tool(description="d", parameters=_SCHEMA, strict=True)
_TURNS = (
    [_USER],
    [{"role": "system", "content": "s"}, {"role": "user", "content": _text("x")}],
    [_USER, {"role": "assistant", "content": "y", "reasoning_content": "z"}, _USER],
    [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}, _USER],
    [_USER, {"role": "tool", "tool_call_id": "c", "content": "1"}, _USER],
)
_FORMS = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": _SCHEMA, "whitespace_pattern": "[ ]?"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"structured_outputs": {"regex": "[ab]{1,9}"}},
    {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [_TOOL, _tool(name="g")], "tool_choice": "auto"},
)
_ITEMS = [
    {"role": "user", "content": _text("x", "input_text")},
    {"type": "reasoning", "content": _text("z", "reasoning_text")},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": _text("1", "output_text")},
]
_RESPONSES: Sequence[Json] = (
    {"input": "x", "instructions": "i", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
    {"input": _ITEMS, "store": False},
    {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}], "tool_choice": "required"},
    {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}},
    {"input": "x", "previous_response_id": "resp_0"},
)
_TOOL_USE = [
    _USER,
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "z"}, *_text("y")]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": _text("1")}]},
]
_MESSAGES: Sequence[Json] = (
    {"messages": [_USER], "system": _text("s"), "stop_sequences": ["q"]},
    {"messages": _TOOL_USE, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"messages": [_USER], "tools": [{"name": "f", "input_schema": _SCHEMA, "strict": True}]},
    {"messages": [_USER], "tools": [{"name": "f", "input_schema": _SCHEMA}], "tool_choice": {"type": "any"}},
)
_WRONG_CHATS: Sequence[Json] = (
    *({"tools": [tool]} for tool in (_tool(name=""), _tool(name="f" * 257), _tool(parameters=[]))),
    {"tools": [_TOOL] * 1025},
    {"tools": [_TOOL], "tool_choice": "perhaps"},
    {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tools": [_tool(parameters={"type": "x"})], "tool_choice": "required"},
    {"tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/none"}}}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"choice": [""]}},
    {"structured_outputs": {"grammar": "start: other"}},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": 5}]}]},
    {"messages": [_USER] * 5000},
)
_WRONG_RESPONSES: Sequence[Json] = (
    {"input": 5},
    {"input": [{"type": "computer_call"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
    {"input": "x", "tools": [{"type": "web_search"}], "tool_choice": "required"},
    {"input": "x", "background": True},
    {"input": "x", "previous_response_id": 5},
    {"input": "x", "text": {"format": {"type": "yaml"}}},
    {"input": "x", "max_output_tokens": 0},
)
_WRONG_MESSAGES: Sequence[Json] = (
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    {"messages": [_USER], "tools": [{"name": "f"}]},
    {"messages": [_USER], "tools": [{"type": "bash_20250124", "name": "bash"}], "tool_choice": {"type": "any"}},
    {"messages": [_USER], "tool_choice": {"type": "any"}},
    {"messages": [_USER], "system": 5},
    {"messages": [_USER], "max_tokens": 0},
)
_WORDS = (
    *("type", "object", "array", "string", "properties", "items", "anyOf", "$ref", "#", "enum", "pattern", "name"),
    *("(a+)+$", "content", "text", "function"),
)


def _any_json(chance: random.Random, depth: int = 0) -> Json:
    """Returns any value, or a schema of a kind that is hard to follow."""
    if depth < MAX_DEPTH and chance.random() < 0.4:
        values = [_any_json(chance, depth + 1) for _ in range(chance.randint(0, 4))]
        return values if chance.random() < 0.5 else {_word(chance): value for value in values}
    return chance.choice(
        (None, True, 0, -1, 2**63, 1e300, "", "x", "\0", "\ud800", _word(chance), "x" * 3000, [], {}, _deep(chance))
    )


def _word(chance: random.Random) -> str:
    return chance.choice((*_WORDS, junk(chance, 8).hex()))


def _deep(chance: random.Random) -> Json:
    value: Json = {"type": "integer"}
    for _ in range(chance.choice((3, 30, 300))):
        value = {"type": "array", "items": value}
    return value


def _any_schema(chance: random.Random) -> Json:
    patterns = ("(a+)+b", "(?=a)", "[", "a{1,9999}", "\\p{L}+", "(.*a){20}")
    schemas: tuple[Json, ...] = (
        _any_json(chance),
        _deep(chance),
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"enum": [junk(chance, 16).hex() for _ in range(chance.randint(1, 2000))]},
        {"type": "string", "pattern": chance.choice(patterns)},
        {"properties": {f"k{at}": _any_json(chance, 3) for at in range(chance.randint(1, 200))}},
        {"type": "array", "minItems": chance.choice((1, 1000, 10**9))},
        {"type": "string", "maxLength": chance.choice((0, 1000, 10**9))},
    )
    schema = chance.choice(schemas)
    json_schema = {"schema": schema, "strict": chance.random() < 0.5}
    forms: tuple[Json, ...] = (
        {"response_format": {"type": "json_schema", "json_schema": json_schema}},
        {"structured_outputs": {"json": schema}},
        {"tools": [_tool(parameters=schema, strict=True)], "tool_choice": chance.choice(("required", "auto"))},
    )
    return chance.choice(forms)


def _any_grammar(chance: random.Random) -> Json:
    texts = (
        junk(chance).hex(),
        junk(chance).decode("latin-1"),
        "start: " + "x " * chance.randint(1, 500),
        "start: start start",
        "start: /" + "(a|" * chance.randint(1, 200) + "b" + ")" * 200 + "/",
        "(" * chance.randint(1, 300) + "a" + ")*" * 300,
        '{"grammars": ' + json.dumps(_any_json(chance)) + "}",
        "root ::= " + "[a-z]" * chance.randint(1, 200),
    )
    return {"structured_outputs": {chance.choice(("regex", "grammar")): chance.choice(texts)}}


def _hard(chance: random.Random) -> Json:
    prime = chance.choice((999_983, 999_979, 999_961, 999_959))
    return {"structured_outputs": {"json": {"type": "integer", "multipleOf": prime + 2 * chance.randrange(1000)}}}


def _forced(chance: random.Random) -> Json:
    """Schemas that leave no choice of a long text, at once, behind a choice or by repetition."""
    word = junk(chance, 16).hex()
    long = chance.choice(
        (
            {"const": word * (100_000 // len(word))},
            {"type": "array", "items": {"const": word * 99}, "minItems": 999, "maxItems": 999},
            {"type": "string", "pattern": f"^({word}){{9999}}$"},
        )
    )
    properties = {"a": {"enum": ["x", "y"]}, "b": long} if chance.random() < 0.5 else {"b": long}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"structured_outputs": {"json": schema}, "max_tokens": 8}


def _no_token_left(chance: random.Random) -> Json:
    """No token that is allowed may follow the first one."""
    pattern = {"regex": f"a[b-{chance.choice('cxyz')}]"}
    return {"structured_outputs": pattern, "allowed_token_ids": [_LETTER_A], "max_tokens": 4}


def _exchanged(value: Json, chance: random.Random, *, within: bool = False) -> Json:
    """Returns an object or a list with one of the values in it, at any depth, exchanged."""
    if not isinstance(value, dict | list) or not value or (within and chance.random() < 0.25):
        return _any_json(chance)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        return [*value[:at], _exchanged(value[at], chance, within=True), *value[at + 1 :]]
    name = chance.choice(list(value))
    return {**value, name: _exchanged(value[name], chance, within=True)}


def _kind(name: str, path: str, make: Callable[[random.Random], Json], *right: int, weight: float = 1.0) -> Kind:
    return Kind(
        name=name,
        make=lambda chance, _: posted(path, json.dumps({**FIELDS[path], **make(chance)}).encode()),
        right=frozenset(map(str, right)),
        weight=weight,
    )


def _wrong(name: str, path: str, bodies: Sequence[Json]) -> Kind:
    return _kind(f"wrong {name}", path, lambda chance: chance.choice(bodies), 400)


def _changed(name: str, path: str, bodies: Sequence[Json], *right: int) -> Kind:
    return _kind(f"changed {name}", path, lambda chance: _exchanged(chance.choice(bodies), chance), *right)


KINDS = (
    _wrong("chat", CHAT, _WRONG_CHATS),
    _wrong("response", RESPONSES, _WRONG_RESPONSES),
    _wrong("message", MESSAGES, _WRONG_MESSAGES),
    _changed("chat", CHAT, [{"messages": turns, **form} for turns in _TURNS for form in _FORMS], 200, 400),
    _changed("response", RESPONSES, _RESPONSES, 200, 400, 404),
    _changed("message", MESSAGES, _MESSAGES, 200, 400),
    _changed("count", COUNT, _MESSAGES, 200, 400),
    _kind("any schema", CHAT, _any_schema, 200, 400),
    _kind("any grammar", CHAT, _any_grammar, 200, 400),
    _kind("hard grammar", CHAT, _hard, 200, 400, weight=RARELY),
    _kind("long forced text", CHAT, _forced, 200, 400, weight=RARELY),
    _kind("no token left", CHAT, _no_token_left, 400, weight=0.1),
)
