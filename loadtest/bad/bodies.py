"""Hostile bodies of tools, grammars and messages, as bytes on a connection: for chats and for both newer APIs.

Some are wrong in one point, some are right bodies with one of their values exchanged for any other, and may be right
still. What is accepted asks for one token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from loadtest.bad.kinds import Kind, Target, junk, posted

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
# Grammars that take all of the time that one may take, one after another: seldom, or nothing else would be measured.
SELDOM = 0.004
MAX_DEPTH = 4
Json = Any

_USER = {"role": "user", "content": "x"}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": _SCHEMA, "strict": True}}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_TURNS = (
    [_USER],
    [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "x"}]}],
    [_USER, {"role": "assistant", "content": "y", "reasoning_content": "z"}, _USER],
    [_USER, {"role": "assistant", "content": None, "tool_calls": [_CALL]}, _USER],
    [_USER, {"role": "tool", "tool_call_id": "c", "content": "1"}, _USER],
)
_FORMS = (
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": _SCHEMA, "whitespace_pattern": "[ ]?"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"guided_regex": "[ab]{1,9}"},
    {"guided_grammar": 'start: "a" | "b"'},
    {"tools": [_TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [_TOOL, {"type": "function", "function": {"name": "g"}}], "tool_choice": "auto"},
)
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "z"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": [{"type": "output_text", "text": "1"}]},
    {"role": "user", "content": "x"},
]
_RESPONSES: tuple[Json, ...] = (
    {"input": "x", "instructions": "i", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}},
    {"input": _ITEMS, "store": False},
    {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}], "tool_choice": "required"},
    {"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA}}},
    {"input": "x", "previous_response_id": "resp_0"},
)
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}
_TOOL_USE = [
    _USER,
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "z"}, {"type": "text", "text": "y"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
    {"role": "user", "content": [_RESULT]},
]
_MESSAGES: tuple[Json, ...] = (
    {"messages": [_USER], "system": [{"type": "text", "text": "s"}], "stop_sequences": ["q"]},
    {"messages": _TOOL_USE, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"messages": [_USER], "tools": [{"name": "f", "input_schema": _SCHEMA}], "tool_choice": {"type": "any"}},
    {"messages": [_USER], "tools": [{"name": "f", "input_schema": _SCHEMA, "strict": True}]},
)
_WRONG_CHATS: tuple[Json, ...] = (
    {"tools": [{"type": "magic"}]},
    {"tools": [{"type": "function", "function": {"name": ""}}]},
    {"tools": [{"type": "function", "function": {"name": "f" * 257}}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
    {"tools": [_TOOL] * 1025},
    {"tools": [_TOOL], "tool_choice": "perhaps"},
    {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
    {"tool_choice": "required"},
    {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
        "tool_choice": "required",
    },
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/$defs/none"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"choice": [""]}},
    {"structured_outputs": {"grammar": "start: other"}},
    {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"id": 5}]}]},
    {"messages": [_USER] * 5000},
)
_WRONG_RESPONSES: tuple[Json, ...] = (
    {"input": 5},
    {"input": [{"type": "computer_call"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
    {"input": "x", "tools": [{"type": "web_search"}]},
    {"input": "x", "background": True},
    {"input": "x", "previous_response_id": 5},
    {"input": "x", "text": {"format": {"type": "yaml"}}},
    {"input": "x", "max_output_tokens": 0},
)
_WRONG_MESSAGES: tuple[Json, ...] = (
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
    {"messages": [_USER], "tools": [{"name": "f"}]},
    {"messages": [_USER], "tools": [{"type": "bash_20250124", "name": "bash"}]},
    {"messages": [_USER], "tool_choice": {"type": "any"}},
    {"messages": [_USER], "system": 5},
    {"messages": [_USER], "max_tokens": 0},
)


def _any_json(chance: random.Random, depth: int = 0) -> Json:
    """Returns any value, or a schema of a kind that is hard to follow."""
    if depth < MAX_DEPTH and chance.random() < 0.4:
        some = range(chance.randint(0, 4))
        if chance.random() < 0.5:
            return [_any_json(chance, depth + 1) for _ in some]
        return {_word(chance): _any_json(chance, depth + 1) for _ in some}
    return chance.choice(
        (None, True, 0, -1, 2**63, 1e300, "", "x", "\0", "\ud800", _word(chance), "x" * 3000, [], {}, _deep(chance))
    )


def _word(chance: random.Random) -> str:
    words = (
        "type",
        "object",
        "array",
        "string",
        "properties",
        "items",
        "anyOf",
        "$ref",
        "#",
        "enum",
        "pattern",
        "name",
    )
    return chance.choice((*words, "(a+)+$", "content", "text", "function", junk(chance, 8).hex()))


def _deep(chance: random.Random) -> Json:
    value: Json = {"type": "integer"}
    for _ in range(chance.choice((3, 30, 300))):
        value = {"type": "array", "items": value}
    return value


def _schema(chance: random.Random) -> Json:
    kinds: tuple[Json, ...] = (
        _any_json(chance),
        _deep(chance),
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"enum": [junk(chance, 16).hex() for _ in range(chance.randint(1, 2000))]},
        {"type": "string", "pattern": chance.choice(("(a+)+b", "(?=a)", "[", "a{1,9999}", "\\p{L}+", "(.*a){20}"))},
        {"properties": {f"k{at}": _any_json(chance, 3) for at in range(chance.randint(1, 200))}},
        {"type": "array", "minItems": chance.choice((1, 1000, 10**9))},
        {"type": "string", "maxLength": chance.choice((0, 1000, 10**9))},
    )
    return chance.choice(kinds)


def _exchanged(value: Json, chance: random.Random, *, within: bool = False) -> Json:
    """Returns an object or a list with one of the values in it, at any depth, exchanged."""
    if not isinstance(value, dict | list) or not value or (within and chance.random() < 0.25):
        return _any_json(chance)
    if isinstance(value, list):
        at = chance.randrange(len(value))
        return [*value[:at], _exchanged(value[at], chance, within=True), *value[at + 1 :]]
    name = chance.choice(list(value))
    return {**value, name: _exchanged(value[name], chance, within=True)}


def _chat(body: Json, **more: Json) -> bytes:
    return json.dumps({"messages": [_USER], "max_tokens": 1, **more, **body}).encode()


def _response(body: Json) -> bytes:
    return json.dumps({"max_output_tokens": 1, "store": False, **body}).encode()


def _message(body: Json) -> bytes:
    return json.dumps({"max_tokens": 1, **body}).encode()


def _of_schema(chance: random.Random) -> bytes:
    schema = _schema(chance)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    forms: tuple[Json, ...] = (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": schema, "strict": chance.random() < 0.5},
            }
        },
        {"structured_outputs": {"json": schema}},
        {"guided_json": schema},
        {"tools": [tool], "tool_choice": chance.choice(("required", "auto"))},
    )
    return _chat(chance.choice(forms))


def _of_text(chance: random.Random) -> bytes:
    text = chance.choice(
        (
            junk(chance).hex(),
            junk(chance).decode("latin-1"),
            "start: " + "x " * chance.randint(1, 500),
            "start: start start",
            "start: /" + "(a|" * chance.randint(1, 200) + "b" + ")" * 200 + "/",
            "(" * chance.randint(1, 300) + "a" + ")*" * 300,
            '{"grammars": ' + json.dumps(_any_json(chance)) + "}",
            "root ::= " + "[a-z]" * chance.randint(1, 200),
        )
    )
    return _chat({chance.choice(("guided_regex", "guided_grammar")): text})


def _hard(chance: random.Random) -> bytes:
    prime = chance.choice((999_983, 999_979, 999_961, 999_959))
    return _chat({"guided_json": {"type": "integer", "multipleOf": prime + 2 * chance.randrange(1000)}})


def _kind(name: str, path: str, make: Callable[[random.Random], bytes], *right: int, weight: float = 1.0) -> Kind:
    def made(chance: random.Random, target: Target) -> tuple[bytes, ...]:
        del target
        return posted(path, make(chance))

    return Kind(name=name, make=made, right=frozenset(map(str, right)), weight=weight)


def _chat_turn(chance: random.Random) -> Json:
    return {"messages": chance.choice(_TURNS), **chance.choice(_FORMS)}


KINDS = (
    _kind("wrong chat", CHAT, lambda chance: _chat(chance.choice(_WRONG_CHATS)), 400),
    _kind("wrong response", RESPONSES, lambda chance: _response(chance.choice(_WRONG_RESPONSES)), 400),
    _kind("wrong message", MESSAGES, lambda chance: _message(chance.choice(_WRONG_MESSAGES)), 400),
    _kind("changed chat", CHAT, lambda chance: _chat(_exchanged(_chat_turn(chance), chance)), 200, 400),
    _kind(
        "changed response",
        RESPONSES,
        lambda chance: _response(_exchanged(chance.choice(_RESPONSES), chance)),
        *(200, 400, 404),
    ),
    _kind("changed message", MESSAGES, lambda chance: _message(_exchanged(chance.choice(_MESSAGES), chance)), 200, 400),
    _kind("changed count", COUNT, lambda chance: _message(_exchanged(chance.choice(_MESSAGES), chance)), 200, 400),
    _kind("any schema", CHAT, _of_schema, 200, 400),
    _kind("any grammar", CHAT, _of_text, 200, 400),
    _kind("hard grammar", CHAT, _hard, 200, 400, weight=SELDOM),
)
