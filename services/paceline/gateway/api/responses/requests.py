"""Turns a body of /v1/responses into one of /v1/chat/completions, and answers into messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.gateway.api.openai.bodies import SharedBody
from paceline.gateway.api.openai.tools import FUNCTION, functions
from paceline.gateway.api.responses.bodies import (
    AllowedFunctions,
    ChosenFunction,
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    ReasoningItem,
    ResponsesBody,
    ResponsesTool,
)
from paceline.gateway.http.fields import UnknownFields, read_fields, read_part, read_result, read_text

NAMESPACE = "namespace"
_SEPARATOR = "__"


def joined(namespace: str | None, name: str) -> str:
    """Returns the name of a function as the model knows it."""
    return f"{(namespace or '').removesuffix(_SEPARATOR)}{_SEPARATOR}{name}" if namespace else name


def flat(tools: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yields the tools of a request with their paths, and in place of a namespace the tools in it."""
    for at, tool in enumerate(tools):
        if not _is_namespace(tool):
            yield f"tools[{at}]", tool
            continue
        for inner_at, inner in enumerate(tool["tools"]):
            named = isinstance(inner, dict) and isinstance(inner.get("name"), str)
            within = {**inner, "name": joined(tool["name"], inner["name"])} if named else inner
            yield f"tools[{at}].tools[{inner_at}]", within


def names_within(tools: Sequence[Any]) -> Mapping[str, tuple[str, str]]:
    """Returns namespace and name of each function that is in one, by the names that the model may call it.

    Models leave namespaces out at times: the bare name stands for a function too, where no other tool has it.
    """
    inner = [
        (tool["name"], each["name"])
        for tool in filter(_is_namespace, tools)
        for each in filter(_is_function, tool["tools"])
    ]
    alone = (tool["name"] for tool in filter(_is_function, tools))
    bare = Counter([*alone, *(name for _, name in inner)])
    return {pair[1]: pair for pair in inner if bare[pair[1]] == 1} | {joined(*pair): pair for pair in inner}


def _is_function(tool: Any) -> bool:
    """Tells whether a tool is one that the model gets; its type may be left out, as nothing else could be meant."""
    return isinstance(tool, dict) and tool.get("type", FUNCTION) == FUNCTION and isinstance(tool.get("name"), str)


def _is_namespace(tool: Any) -> bool:
    return (
        isinstance(tool, dict)
        and tool.get("type") == NAMESPACE
        and isinstance(tool.get("name"), str)
        and isinstance(tool.get("tools"), list)
    )


Json = dict[str, Any]
_PASSED = (*SharedBody.model_fields, "stop", "chat_template_kwargs")
# Where in the request a message begins.
_PLACE = "place"
REFERENCE = "item_reference"
_CALL, _CALL_OUTPUT = "_call", "_call_output"
# Fields that are no arguments, in calls of tools that are no functions.
_OF_CALLS = frozenset({"type", "id", "call_id", "name", "status"})


def chat_of(body: ResponsesBody, earlier: Sequence[Json], unknown: UnknownFields) -> tuple[Json, list[str]]:
    """Returns the body of a chat, and where in the request each of its messages begins.

    Args:
        body: The request's body.
        earlier: Messages of the responses that it continues, without instructions.
        unknown: Collects what is unknown in items, and items and tools that are left out.

    Raises:
        InvalidRequestError: An item or a tool is wrong.
    """
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    added = input_messages(body, unknown)
    places = [*["instructions"] * len(system), *["previous_response_id"] * len(earlier)]
    places += [message.pop(_PLACE) for message in added]
    messages = [*system, *earlier, *added]
    chat: Json = {"messages": messages}
    chat |= {name: value for name in _PASSED if (value := getattr(body, name)) is not None}
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    if body.tools:
        offered = functions(flat(body.tools), unknown)
        tools = [read_fields(ResponsesTool, each, unknown, field) for field, each in offered]
        chat["tools"] = [{"type": "function", "function": each.model_dump(exclude={"type"})} for each in tools]
        chat["parallel_tool_calls"] = body.parallel_tool_calls
    if body.tool_choice is not None:
        chat["tool_choice"] = _choice(body.tool_choice, unknown)
    if body.text.format is not None:
        chat["response_format"] = _format(body.text.format)
    return chat, places


def _choice(choice: Any, unknown: UnknownFields) -> Any:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return _named(choice.get("name"))
    if kind != "allowed_tools":
        return choice
    allowed = read_fields(AllowedFunctions, choice, unknown, "tool_choice")
    tools = [_allowed(each, f"tool_choice.tools[{at}]", unknown) for at, each in enumerate(allowed.tools)]
    return {"type": kind, kind: {"mode": allowed.mode, "tools": tools}}


def _allowed(tool: Any, field: str, unknown: UnknownFields) -> Any:
    """Returns an allowed tool as chats name it; one that is no function stays as it is."""
    kind = tool.get("type") if isinstance(tool, dict) else FUNCTION
    return tool if kind != FUNCTION else _named(read_fields(ChosenFunction, tool, unknown, field).name)


def _named(name: Any) -> Json:
    return {"type": "function", "function": {"name": name}}


def _format(given: Json) -> Json:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def referred(given: Any) -> list[str]:
    """Returns the ids of earlier items that an input refers to."""
    return [each["id"] for each in given if _is_reference(each)] if isinstance(given, list) else []


def with_items(fields: Json, items: Mapping[str, Json]) -> Json:
    """Returns a request with the items in its input that this refers to, as far as they are known by these ids."""
    given = fields.get("input")
    if not items or not isinstance(given, list):
        return fields
    return {**fields, "input": [items.get(each["id"], each) if _is_reference(each) else each for each in given]}


def _is_reference(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == REFERENCE and isinstance(item.get("id"), str)


def input_messages(body: ResponsesBody, unknown: UnknownFields) -> list[Json]:
    """Returns what the request adds to a conversation; each message has its place in the request beside it.

    Raises:
        InvalidRequestError: An item is wrong.
    """
    # Not checked when the body was read.
    given: Any = body.input
    if isinstance(given, str):
        return [{_PLACE: "input", "role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidRequestError("input", "must be a string or a list of items")
    read = [(f"input[{at}]", _message(item, f"input[{at}]", unknown)) for at, item in enumerate(given)]
    return joined_turns([{_PLACE: field, **message} for field, message in read if message is not None])


def _message(item: Any, field: str, unknown: UnknownFields) -> Json | None:
    """Returns an item as a message; None: it has nothing for the model.

    Calls of tools that are no functions, and what these have answered, are read as those of functions. A server's
    own calls are left out, as are items that only their author can read.
    """
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind == "message" or "role" in item:
        message = read_fields(InputMessage, item, unknown, field)
        given = message.content
        text = None if given is None else read_text(given, unknown, f"{field}.content")
        return {"role": message.role, "content": text}
    if kind == "function_call":
        call = read_fields(FunctionCall, item, unknown, field)
        return _called(call.call_id, joined(call.namespace, call.name), call.arguments)
    if kind == "function_call_output":
        output = read_fields(FunctionCallOutput, item, unknown, field)
        return _result(output.call_id, output.output, field, unknown)
    if kind == "reasoning":
        return _reasoning(read_fields(ReasoningItem, item, unknown, field), field, unknown)
    if kind.endswith(_CALL_OUTPUT):
        given = item.get("output")
        parts = [given] if isinstance(given, dict) else given
        return _result(_text(item.get("call_id")) or _text(item.get("id")), parts, field, unknown)
    if kind.endswith(_CALL) and _text(item.get("call_id")):
        name = _text(item.get("name")) or kind.removesuffix(_CALL)
        rest = {name: value for name, value in item.items() if name not in _OF_CALLS and value is not None}
        return _called(item["call_id"], name, item.get("arguments", rest))
    unknown.leave_out(field, kind)
    return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _result(call_id: str, output: Any, field: str, unknown: UnknownFields) -> Json:
    content = read_result(output, unknown, f"{field}.output")
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def _reasoning(item: ReasoningItem, field: str, unknown: UnknownFields) -> Json | None:
    texts = [read_part(each, unknown, f"{field}.content[{at}]") for at, each in enumerate(item.content)]
    return {"role": "assistant", "reasoning_content": "".join(texts)} if any(texts) else None


def _called(call_id: str, name: str, arguments: Any) -> Json:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def output_messages(output: Sequence[Json]) -> list[Json]:
    """Returns the items of an answer as messages of a chat."""
    messages: list[Json] = []
    for item in output:
        if item["type"] == "function_call":
            messages.append(_called(item["call_id"], joined(item.get("namespace"), item["name"]), item["arguments"]))
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
            turns.append({**message, **({"tool_calls": [*message["tool_calls"]]} if "tool_calls" in message else {})})
            continue
        if "tool_calls" in message:
            last.setdefault("tool_calls", []).extend(message["tool_calls"])
        # The first has its place.
        turns[-1] = {**message, **last}
    # To most templates, reasoning alone is no message.
    return [{"content": "", **turn} for turn in turns]
