"""Histories of agents as bodies: shuffled, doubled, cut, replayed and broken in their fields, for all three APIs.

Each begins as a conversation that an agent would have, with reasoning, calls, results and instructions. Many are served
after that; of one that is refused, the answer has to name the message. Accepted requests ask for one token.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from loadtest.bad.bodies import CHAT, COUNT, FIELDS, MESSAGES, RESPONSES
from loadtest.bad.kinds import Kind, posted

Json = Any
MAX_TURNS, MAX_CHANGES = 6, 4
LISTS = {CHAT: "messages", RESPONSES: "input", MESSAGES: "messages", COUNT: "messages"}
# Fields that a refusal names: a message, or the whole where nothing is left of it or it is too long.
_WHOLE = "must hold at least one|the context of"
NAMED = {path: rf"{name}\[\d+\]|{_WHOLE}" for path, name in LISTS.items()}

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
_ARGUMENTS = '{"a": 1}'
_IDS = ("call_0123456789abcdef01234567", "toolu_01", "Ab3dEf6hI", "1")
# Templates of the kinds that refuse conversations; a chat may bring its own.
_TEMPLATES = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{{ m.role + (m.content or '') }}"
    "{% endfor %}",
    "{% set t = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (t.n % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set t.n = t.n + 1 %}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{{ m.role }}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"
    "{% endfor %}{% endfor %}",
)


def _texts(kind: str = "text") -> tuple[Json, ...]:
    return (None, "", "x", [], [{"type": kind, "text": "x"}], [{"type": kind, "text": ""}, {"type": kind, "text": "y"}])


# Bad values of a field, wherever it stands in a history.
_VALUES: Mapping[str, Sequence[Json]] = {
    "arguments": ('{"a": ', "", "null", "[1]", "5", '"x"', "{}}", {}, {"a": 1}, None, "{" * 200),
    "input": ({}, None, [], "{", {"a": {"b": []}}),
    "content": _texts(),
    "output": (*_texts("output_text"), {"a": 1}),
    "role": ("system", "developer", "user", "assistant", "tool", "function", None),
    "name": ("g", "", None),
    "type": ("function_call", "item_reference", "web_search_call", "custom_tool_call", "thinking", "magic", None),
    "tool_calls": (None, [], [{}]),
    "is_error": (True, None),
    **dict.fromkeys(("id", "call_id", "tool_call_id", "tool_use_id"), (*_IDS, "", None)),
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking", "text", "signature"), ("", None, "</think>", "z")),
}


def _chat_turn(call_id: str, number: int) -> list[Json]:
    call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": _ARGUMENTS}}
    return [
        {"role": ("system", "developer", "user")[number % 3], "content": f"question {number}"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {"role": "assistant", "content": None, "reasoning_content": "z", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": "1"},
        {"role": "assistant", "content": "y"},
    ]


def _response_turn(call_id: str, number: int) -> list[Json]:
    role = ("system", "developer", "user")[number % 3]
    return [
        {"type": "message", "role": role, "content": [{"type": "input_text", "text": f"question {number}"}]},
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "z"}]},
        {"type": "function_call", "call_id": call_id, "name": "f", "arguments": _ARGUMENTS},
        {"type": "function_call_output", "call_id": call_id, "output": "1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
    ]


def _message_turn(call_id: str, number: int) -> list[Json]:
    call = {"type": "tool_use", "id": call_id, "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": call_id, "content": "1", "is_error": False}
    return [
        {"role": ("system", "user", "user")[number % 3], "content": f"question {number}"},
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "z", "signature": "s"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "<system-reminder>r</system-reminder>"}]},
        {"role": "assistant", "content": "y"},
    ]


_TURNS = {CHAT: _chat_turn, RESPONSES: _response_turn, MESSAGES: _message_turn, COUNT: _message_turn}
_TOOLS: Mapping[str, Sequence[Json]] = {
    CHAT: [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}],
    RESPONSES: [{"type": "function", "name": "f", "parameters": _SCHEMA}, {"type": "web_search"}],
    MESSAGES: [{"name": "f", "input_schema": _SCHEMA}],
    COUNT: [{"name": "f", "input_schema": _SCHEMA}],
}
_MORE: Mapping[str, Callable[[random.Random], Json]] = {
    CHAT: lambda chance: {"chat_template": chance.choice(_TEMPLATES)} if chance.random() < 0.5 else {},
    RESPONSES: lambda chance: {"instructions": chance.choice(("i", None))},
    MESSAGES: lambda chance: {"system": chance.choice(("s", [{"type": "text", "text": "s"}]))},
    COUNT: lambda _: {},
}


def _shuffled(history: list[Json], chance: random.Random) -> list[Json]:
    return chance.sample(history, len(history))


def _doubled(history: list[Json], chance: random.Random) -> list[Json]:
    at = chance.randrange(len(history))
    to = chance.randint(0, len(history))
    return [*history[:to], history[at], *history[to:]]


def _cut(history: list[Json], chance: random.Random) -> list[Json]:
    begin, end = sorted(chance.sample(range(len(history) + 1), 2))
    return history[begin:end]


def _replayed(history: list[Json], chance: random.Random) -> list[Json]:
    return history + history[: chance.randint(1, len(history))]


def _broken(value: Json, chance: random.Random) -> Json:
    """Returns a history, or a part of one, in which one field has another value or is missing."""
    if isinstance(value, list) and value:
        at = chance.randrange(len(value))
        return [*value[:at], _broken(value[at], chance), *value[at + 1 :]]
    if not isinstance(value, dict) or not value:
        return value
    name = chance.choice(list(value))
    if isinstance(value[name], list | dict) and chance.random() < 0.7:
        return {**value, name: _broken(value[name], chance)}
    rest = {key: each for key, each in value.items() if key != name}
    return rest if chance.random() < 0.2 else {**rest, name: chance.choice(_VALUES.get(name, (None, "x")))}


_CHANGES = {"shuffled": _shuffled, "doubled": _doubled, "cut": _cut, "replayed": _replayed, "broken": _broken}


def _body(path: str, change: str, chance: random.Random) -> Json:
    """Returns a body whose history has been changed in this way, and then maybe in others."""
    turns = range(chance.randint(1, MAX_TURNS))
    history = [item for number in turns for item in _TURNS[path](chance.choice(_IDS), number)]
    for name in (change, *chance.choices(list(_CHANGES), k=chance.randint(0, MAX_CHANGES - 1))):
        history = _CHANGES[name](history, chance)
    tools = {"tools": _TOOLS[path]} if chance.random() < 0.7 else {}
    return {**FIELDS[path], **_MORE[path](chance), **tools, LISTS[path]: history}


def _kind(path: str, change: str) -> Kind:
    return Kind(
        name=f"{path.removeprefix('/v1/')}, {change}",
        make=lambda chance, _: posted(path, json.dumps(_body(path, change, chance)).encode()),
        right=frozenset({"200", "400"}),
        names=NAMED[path],
    )


KINDS = tuple(_kind(path, change) for path in (CHAT, RESPONSES, MESSAGES, COUNT) for change in _CHANGES)
