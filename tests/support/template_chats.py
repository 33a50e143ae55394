"""Chats that templates render, and what transformers makes of them. It needs nothing but the standard library."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

Json = dict[str, Any]

OWN_TEMPLATES = Path(__file__).resolve().parents[1] / "data" / "templates"
BOS, EOS = "<|begin|>", "<|end|>"

TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name."}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
    for name in ("weather", "news")
]
SYSTEM: Json = {"role": "system", "content": "Answer <briefly> & well."}
ASK: Json = {"role": "user", "content": "How is Zürich?"}
ANSWER: Json = {"role": "assistant", "content": "It is sunny."}
AGAIN: Json = {"role": "user", "content": "And in Oslo?\n"}


def thought(message: Json) -> Json:
    """Returns a message with reasoning, under all of its names."""
    return {**message, **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "I had better look.")}


def calling(*names: str) -> Json:
    """Returns a message that calls tools."""
    calls = [
        {
            "id": f"call0000{at}",
            "type": "function",
            "function": {"name": name, "arguments": {"city": "Genève", "days": 2}},
        }
        for at, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(at: int, name: str) -> Json:
    """Returns what a call came to."""
    return {"role": "tool", "tool_call_id": f"call0000{at}", "name": name, "content": f'The {name}: "fine"'}


_BOTH = [calling("weather", "news"), result(0, "weather"), result(1, "news")]
# Messages, and whether tools are there.
CHATS: dict[str, tuple[list[Json], bool]] = {
    "a system message": ([SYSTEM, ASK], False),
    "no system message": ([ASK, ANSWER, AGAIN], False),
    "tools": ([SYSTEM, ASK], True),
    "tools without a system message": ([ASK, ANSWER, AGAIN], True),
    "a result": ([SYSTEM, ASK, calling("weather"), result(0, "weather")], True),
    "a result and an answer": ([ASK, calling("news"), result(0, "news"), ANSWER, AGAIN], True),
    "two calls in one turn": ([SYSTEM, ASK, *_BOTH], True),
    "reasoning in the history": ([ASK, thought(ANSWER), AGAIN], False),
    "reasoning before a call": ([ASK, thought(calling("weather")), result(0, "weather")], True),
}


def expected(render: Callable[[list[Json]], str], messages: Sequence[Json]) -> str | None:
    """Returns what a template renders in the first of all forms of messages in which it loses fewest of their texts.

    Args:
        render: transformers' own rendering; raises what it likes.
        messages: The chat.

    Returns:
        The prompt; None: the template refuses all forms.
    """
    wanted = [text for message in messages for text in _texts(message)]
    rendered = []
    for forms in product(
        (_same, _arguments_as_text), (_same, _in_parts), (_same, _tools_in_parts), (_same, _system_in_user)
    ):
        changed = list(messages)
        for form in forms:
            changed = form(changed)
        try:
            rendered.append(render(changed))
        except Exception:  # noqa: BLE001 - a template may fail in any way
            continue
    # Python's spelling of an object is no JSON.
    return max(rendered, key=lambda each: sum(text in each for text in wanted) - ("{'city'" in each), default=None)


def _texts(message: Json) -> list[str]:
    """What must not be lost, as far as templates spell it alike."""
    calls = message.get("tool_calls", ())
    return [message["content"].strip().split('"')[0], *(call["function"]["name"] for call in calls)]


def _same(messages: list[Json]) -> list[Json]:
    return messages


def _system_in_user(messages: list[Json]) -> list[Json]:
    if [each["role"] for each in messages[:2]] != ["system", "user"]:
        return messages
    system, user, *others = messages
    return [{**user, "content": f"{system['content']}\n\n{user['content']}"}, *others]


def _in_parts(messages: list[Json]) -> list[Json]:
    return [each if each["role"] == "tool" else _parted(each) for each in messages]


def _tools_in_parts(messages: list[Json]) -> list[Json]:
    return [_parted(each) if each["role"] == "tool" else each for each in messages]


def _parted(message: Json) -> Json:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _arguments_as_text(messages: list[Json]) -> list[Json]:
    return [
        {**each, "tool_calls": [_call_with_text(call) for call in each["tool_calls"]]} if "tool_calls" in each else each
        for each in messages
    ]


def _call_with_text(call: Json) -> Json:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}
