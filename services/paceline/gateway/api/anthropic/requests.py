"""Turns a body of Anthropic's API into one of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.anthropic.bodies import (
    CountBody,
    MessagesBody,
    MessagesTool,
    MessageTurn,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from paceline.gateway.api.openai.bodies import SharedBody
from paceline.gateway.api.openai.tools import functions, placed
from paceline.gateway.http.fields import (
    UnknownFields,
    is_text,
    read_fields,
    read_part,
    read_result,
    read_text,
    text_within,
)

Json = dict[str, Any]
_ASSISTANT = "assistant"
# How the kinds of blocks end that belong to tools which a server runs.
_OF_SERVER_TOOLS = ("_tool_use", "_tool_result", "container_upload")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def prompt_of(body: CountBody, unknown: UnknownFields) -> tuple[Json, list[str]]:
    """Returns the fields that make the prompt, and where in the request each of their messages begins.

    Raises:
        InvalidRequestError: A block or a tool is wrong, or a block of a user is of a kind that is not served.
    """
    system = read_text(body.system, unknown, "system")
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    places = ["system"] * len(messages)
    for at, given in enumerate(body.messages):
        field = f"messages[{at}]"
        messages += _messages(read_fields(MessageTurn, given, unknown, field), field, unknown)
        places += [field] * (len(messages) - len(places))
    chat: Json = {"messages": messages}
    if _is_begun(messages[-1:]):
        chat["continue_final_message"] = True
    if body.tools:
        offered = functions(placed(body.tools), unknown, "custom")
        chat["tools"] = [_tool(read_fields(MessagesTool, each, unknown, field)) for field, each in offered]
    for at, server in enumerate(body.mcp_servers):
        unknown.leave_out_tool(f"mcp_servers[{at}]", "mcp", server.get("name") if isinstance(server, dict) else None)
    variables: Json = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    if variables:
        chat["chat_template_kwargs"] = variables
    return chat, places


def generation_of(body: MessagesBody, unknown: UnknownFields) -> tuple[Json, list[str]]:
    """Returns the whole body, and where in the request each of its messages begins.

    Raises:
        InvalidRequestError: As of `prompt_of`.
    """
    chat, places = prompt_of(body, unknown)
    chat["max_tokens"] = body.max_tokens
    if body.stop_sequences:
        chat["stop"] = body.stop_sequences
    chat |= {name: value for name in SharedBody.model_fields if (value := getattr(body, name)) is not None}
    chat["chat_template_kwargs"] = {**chat.get("chat_template_kwargs", {}), **body.chat_template_kwargs}
    given = body.output_config.format
    if given is not None:
        chat["response_format"] = {"type": given.get("type"), "json_schema": {"schema": given.get("schema")}}
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        chat["tool_choice"] = _CHOICES.get(choice.type, named)
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return chat, places


def _is_begun(last: Sequence[Json]) -> bool:
    """Tells whether a conversation ends with text of the assistant, which the answer continues."""
    return any(each["role"] == _ASSISTANT and each["content"] and "tool_calls" not in each for each in last)


def _tool(tool: MessagesTool) -> Json:
    described = {} if tool.description is None else {"description": tool.description}
    function = {"name": tool.name, **described, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": function}


def _messages(turn: MessageTurn, field: str, unknown: UnknownFields) -> list[Json]:
    """Returns the messages of one turn: results of tools are messages of their own, before the user's text."""
    # Not checked when the turn was read.
    given: Any = turn.content
    if given is None or isinstance(given, str):
        return [{"role": turn.role, "content": given}]
    if not isinstance(given, list):
        raise InvalidRequestError(f"{field}.content", "must be a string or a list of blocks")
    results: list[Json] = []
    texts: list[str] = []
    thoughts: list[str] = []
    message: Json = {}
    for at, block in enumerate(given):
        where = f"{field}.content[{at}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(read_fields(ThinkingBlock, block, unknown, where).thinking)
        elif isinstance(block, str) or is_text(block):
            texts.append(read_part(block, unknown, where))
        elif kind == "tool_use":
            message.setdefault("tool_calls", []).append(_call(read_fields(ToolUseBlock, block, unknown, where)))
        elif kind == "tool_result":
            results.append(_result(read_fields(ToolResultBlock, block, unknown, where), where, unknown))
        elif kind != "redacted_thinking":
            texts += _other_text(block, kind, where, unknown, left_out=turn.role == _ASSISTANT)
    content = "\n".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    # A turn of the assistant stays one, even if the model gets nothing of it: some templates count turns.
    said = texts or message or turn.role == _ASSISTANT
    return [*results, *([{"role": turn.role, "content": content, **message}] if said else [])]


def _other_text(block: Any, kind: Any, where: str, unknown: UnknownFields, *, left_out: bool) -> list[str]:
    """Returns the text of a block of another kind, such as a document; none of one that belongs to a server's tool.

    Args:
        block: The JSON value.
        kind: Its `type`.
        unknown: Collects blocks that are left out.
        left_out: Whether all blocks without text are.

    Raises:
        InvalidRequestError: It has no text, as an image.
    """
    of_tool = isinstance(kind, str) and kind.endswith(_OF_SERVER_TOOLS)
    text = None if of_tool else text_within(block)
    if text is not None:
        return [text]
    if not isinstance(kind, str) or not (of_tool or left_out):
        raise InvalidRequestError(f"{where}.type", f"{str(kind)[:80]!r} is not supported by this server")
    unknown.leave_out(where, kind)
    return []


def _call(block: ToolUseBlock) -> Json:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _result(block: ToolResultBlock, where: str, unknown: UnknownFields) -> Json:
    content = read_result(block.content, unknown, f"{where}.content")
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
