"""Turns a body of Anthropic's API into one of /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.anthropic.bodies import (
    CountBody,
    MessagesBody,
    MessagesTool,
    MessageTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline.gateway.http.fields import UnknownFields, read_fields, read_text

Json = dict[str, Any]
_PASSED = ("temperature", "top_p", "top_k", "seed", "priority", "cache_salt", "speculation")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def prompt_of(body: CountBody, unknown: UnknownFields) -> Json:
    """Returns the fields that make the prompt.

    Raises:
        InvalidRequestError: A block or a tool is wrong, or of a kind that is not served.
    """
    system = read_text(TextBlock, body.system, unknown, "system")
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    for at, given in enumerate(body.messages):
        messages += _messages(read_fields(MessageTurn, given, unknown, f"messages[{at}]"), f"messages[{at}]", unknown)
    chat: Json = {"messages": messages}
    if _is_begun(messages[-1:]):
        chat["continue_final_message"] = True
    if body.tools:
        tools = [read_fields(MessagesTool, each, unknown, f"tools[{at}]") for at, each in enumerate(body.tools)]
        chat["tools"] = [_tool(each) for each in tools]
    variables: Json = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    if variables:
        chat["chat_template_kwargs"] = variables
    return chat


def generation_of(body: MessagesBody, unknown: UnknownFields) -> Json:
    """Returns the whole body.

    Raises:
        InvalidRequestError: As of `prompt_of`.
    """
    chat = prompt_of(body, unknown)
    chat |= {"model": body.model, "max_tokens": body.max_tokens, "stream": body.stream}
    if body.stop_sequences:
        chat["stop"] = body.stop_sequences
    chat |= {name: value for name in _PASSED if (value := getattr(body, name)) is not None}
    chat["chat_template_kwargs"] = {**chat.get("chat_template_kwargs", {}), **body.chat_template_kwargs}
    given = body.output_config.format
    if given is not None:
        chat["response_format"] = {"type": given.get("type"), "json_schema": {"schema": given.get("schema")}}
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        chat["tool_choice"] = _CHOICES.get(choice.type, named)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return chat


def _is_begun(last: Sequence[Json]) -> bool:
    """Tells whether a conversation ends with text of the assistant, which the answer continues."""
    return any(each["role"] == "assistant" and each["content"] and "tool_calls" not in each for each in last)


def _tool(tool: MessagesTool) -> Json:
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": function}


def _messages(turn: MessageTurn, field: str, unknown: UnknownFields) -> list[Json]:
    """Returns the messages of one turn: results of tools are messages of their own, before the user's text."""
    # Not checked when the turn was read.
    given: Any = turn.content
    if isinstance(given, str):
        return [{"role": turn.role, "content": given}]
    if not isinstance(given, list):
        raise InvalidRequestError(f"{field}.content", "must be a string or a list of blocks")
    results: list[Json] = []
    texts: list[str] = []
    message: Json = {}
    for at, block in enumerate(given):
        where = f"{field}.content[{at}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts.append(read_fields(TextBlock, block, unknown, where).text)
        elif kind == "thinking":
            thought = read_fields(ThinkingBlock, block, unknown, where).thinking
            message["reasoning_content"] = message.get("reasoning_content", "") + thought
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(read_fields(ToolUseBlock, block, unknown, where)))
        elif kind == "tool_result":
            results.append(_result(read_fields(ToolResultBlock, block, unknown, where), where, unknown))
        elif kind != "redacted_thinking":
            raise InvalidRequestError(f"{where}.type", f"{str(kind)[:80]!r} is not supported by this server")
    content = "\n".join(texts)
    return [*results, *([{"role": turn.role, "content": content, **message}] if texts or message else [])]


def _call(block: ToolUseBlock) -> Json:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _result(block: ToolResultBlock, where: str, unknown: UnknownFields) -> Json:
    content = read_text(TextBlock, block.content, unknown, f"{where}.content")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
