"""Turns a body of /v1/responses into one of /v1/chat/completions, and answers into messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.responses.bodies import (
    AllowedFunctions,
    ChosenFunction,
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    InputText,
    ReasoningItem,
    ReasoningText,
    ResponsesBody,
    ResponsesTool,
)
from paceline.gateway.http.fields import UnknownFields, read_fields, read_text

Json = dict[str, Any]
_PASSED = (
    *("temperature", "top_p", "top_k", "seed", "stop"),
    *("priority", "cache_salt", "chat_template_kwargs", "speculation"),
)


def chat_of(body: ResponsesBody, earlier: Sequence[Json], unknown: UnknownFields) -> Json:
    """Returns the body of a chat.

    Args:
        body: Of the request.
        earlier: Messages of the responses that it continues, without instructions.
        unknown: Collects unknown fields of items.

    Raises:
        InvalidRequestError: An item or a tool is wrong, or of a kind that is not served.
    """
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    messages = [*system, *earlier, *input_messages(body, unknown)]
    chat: Json = {"model": body.model, "messages": messages, "stream": body.stream}
    chat |= {name: value for name in _PASSED if (value := getattr(body, name)) is not None}
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        tools = [read_fields(ResponsesTool, each, unknown, f"tools[{at}]") for at, each in enumerate(body.tools)]
        chat["tools"] = [{"type": "function", "function": each.model_dump(exclude={"type"})} for each in tools]
        chat["parallel_tool_calls"] = body.parallel_tool_calls
    if body.tool_choice is not None:
        chat["tool_choice"] = _choice(body.tool_choice, unknown)
    if body.text.format is not None:
        chat["response_format"] = _format(body.text.format)
    return chat


def _choice(choice: Any, unknown: UnknownFields) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return _named(choice.get("name"))
    if kind != "allowed_tools":
        return choice
    allowed = read_fields(AllowedFunctions, choice, unknown, "tool_choice")
    names = [
        read_fields(ChosenFunction, each, unknown, f"tool_choice.tools[{at}]").name
        for at, each in enumerate(allowed.tools)
    ]
    return {"type": kind, kind: {"mode": allowed.mode, "tools": list(map(_named, names))}}


def _named(name: Any) -> Json:
    return {"type": "function", "function": {"name": name}}


def _format(given: Json) -> Json:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def input_messages(body: ResponsesBody, unknown: UnknownFields) -> list[Json]:
    """Returns what the request adds to a conversation.

    Raises:
        InvalidRequestError: An item is wrong, or of a kind that is not served.
    """
    # Not checked when the body was read.
    given: Any = body.input
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidRequestError("input", "must be a string or a list of items")
    return joined_turns([_message(item, f"input[{at}]", unknown) for at, item in enumerate(given)])


def _message(item: Any, field: str, unknown: UnknownFields) -> Json:
    kind = (item.get("type") if isinstance(item, dict) else None) or "message"
    if kind == "message":
        message = read_fields(InputMessage, item, unknown, field)
        return {"role": message.role, "content": read_text(InputText, message.content, unknown, f"{field}.content")}
    if kind == "function_call":
        call = read_fields(FunctionCall, item, unknown, field)
        return _called(call.call_id, call.name, call.arguments)
    if kind == "function_call_output":
        output = read_fields(FunctionCallOutput, item, unknown, field)
        text = read_text(InputText, output.output, unknown, f"{field}.output")
        return {"role": "tool", "tool_call_id": output.call_id, "content": text}
    if kind == "reasoning":
        thought = read_fields(ReasoningItem, item, unknown, field)
        parts = [
            read_fields(ReasoningText, each, unknown, f"{field}.content[{at}]").text
            for at, each in enumerate(thought.content)
        ]
        return {"role": "assistant", "reasoning_content": "".join(parts)}
    raise InvalidRequestError(f"{field}.type", f"{str(kind)[:80]!r} is not supported by this server")


def _called(call_id: str, name: str, arguments: str) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def output_messages(output: Sequence[Json]) -> list[Json]:
    """Returns the items of an answer as messages of a chat."""
    messages: list[Json] = []
    for item in output:
        if item["type"] == "function_call":
            messages.append(_called(item["call_id"], item["name"], item["arguments"]))
        else:
            name = "content" if item["type"] == "message" else "reasoning_content"
            messages.append({"role": "assistant", name: "".join(part["text"] for part in item["content"])})
    return joined_turns(messages)


def joined_turns(messages: Sequence[Json]) -> list[Json]:
    """Joins consecutive messages of the assistant: reasoning, text and calls of one turn."""
    turns: list[Json] = []
    for message in messages:
        last = turns[-1] if turns else {}
        # A second text, or reasoning behind it, begins another turn.
        ended = "content" in last and not message.keys().isdisjoint({"content", "reasoning_content"})
        if message["role"] != "assistant" or last.get("role") != "assistant" or ended:
            turns.append(dict(message))
            continue
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        turns[-1] = {**last, **message, **({"tool_calls": calls} if calls else {})}
    # To most templates, reasoning alone is no message.
    return [{"content": "", **turn} for turn in turns]
