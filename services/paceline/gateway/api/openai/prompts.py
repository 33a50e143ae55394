"""Prompts of OpenAI's bodies: texts, token ids, and chats by the model's template.

Agents send back what models have written: arguments that are cut off, calls without ids, messages without content. The
conversation goes on all the same. It knows the bodies and the tokenizer; it does no I/O.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from paceline.core.errors import ConfigError, InvalidRequestError, shortened
from paceline.gateway.api.openai.bodies import TEMPLATE_NAMES, ChatFields, ChatMessage
from paceline.gateway.api.openai.tools import ToolCall
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.http.fields import UnknownFields, read_fields, read_result, read_text
from paceline.gateway.message.schemas import Json
from paceline.gateway.sessions.request import MAX_CHOICES, MAX_TEMPLATE_CHARACTERS
from paceline.gateway.text.chat_template import ChatTemplate, TemplateRefusalError

MAX_REASON_CHARACTERS = 120
_FUNCTION, _TOOL, _SYSTEM = "function", "tool", "system"
# A message of these without content is a mistake, not a part of an agent's history.
_SPOKEN = frozenset({"system", "developer", "user"})


def plain_messages(given: Sequence[Any], unknown: UnknownFields) -> list[Json]:
    """Returns messages as chat templates take them.

    Args:
        given: The JSON values.
        unknown: Collects unknown fields, and parts that are left out.

    Raises:
        InvalidRequestError: A field of a message is wrong.
    """
    ids = _CallIds()
    return [_plain(each, f"messages[{at}]", ids, unknown) for at, each in enumerate(given)]


def refused_at(messages: Sequence[Json], reason: str, refusal: Callable[[Sequence[Json]], str]) -> InvalidRequestError:
    """Returns the error of a conversation that a chat template refuses: which message, why, and what to change.

    Args:
        reason: The template's words.
        refusal: Returns the template's words about the beginning of a conversation; empty: it takes it.
    """
    # The message that brings the refusal: without it, the template has nothing to say, or something else.
    at = bisect_left(range(len(messages) - 1), True, key=lambda last: refusal(messages[: last + 1]) == reason)
    words = shortened(reason, MAX_REASON_CHARACTERS)
    return InvalidRequestError(f"messages[{at}]", f"the chat template refuses it: {words}; {_advice(messages, at)}")


def _plain(given: Any, field: str, ids: _CallIds, unknown: UnknownFields) -> Json:
    message = read_fields(ChatMessage, given, unknown, field)
    if message.content is None and message.role in _SPOKEN:
        raise InvalidRequestError(f"{field}.content", "is required")
    role = _TOOL if message.role == _FUNCTION else message.role
    plain: Json = {"role": role, "content": _content(message, f"{field}.content", unknown)}
    calls = [
        _plain_call(read_fields(ToolCall, each, unknown, where), where, ids)
        for at, each in enumerate(message.tool_calls)
        for where in [f"{field}.tool_calls[{at}]"]
    ]
    if message.function_call is not None:
        calls.append(_plain_call(ToolCall(function=message.function_call), field, ids))
    if calls:
        plain["tool_calls"] = calls
    thoughts = [each for each in (message.reasoning, message.reasoning_content, message.thinking) if each is not None]
    if thoughts:
        # Templates, like clients, disagree on its name.
        plain |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), next(filter(None, thoughts), ""))
    if message.name is not None:
        plain["name"] = message.name
    if role == _TOOL:
        plain["tool_call_id"] = ids.of_result(message.tool_call_id)
    elif message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _content(message: ChatMessage, field: str, unknown: UnknownFields) -> str:
    if message.role in (_TOOL, _FUNCTION):
        return read_result(message.content, unknown, field)
    given = message.refusal if message.content is None else message.content
    return "" if given is None else read_text(given, unknown, field)


def _plain_call(call: ToolCall, field: str, ids: _CallIds) -> Json:
    """Returns a call as templates take it; that of a tool that is no function has its text as one argument."""
    if call.custom is not None:
        name, arguments = call.custom.name, {"input": call.custom.input}
    elif call.function is not None:
        name, arguments = call.function.name, _object(call.function.arguments)
    else:
        raise InvalidRequestError(f"{field}.function", "is required")
    return {"id": ids.of_call(call.id), "type": "function", "function": {"name": name, "arguments": arguments}}


def _object(arguments: Any) -> Json:
    """Returns arguments as the object that templates take; broken ones, or others than an object, as an empty one."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


class _CallIds:
    """Gives ids to calls and results that have none.

    A result without an id answers the oldest call that has no result yet. The ids have nine letters and digits: some
    templates refuse others.
    """

    def __init__(self) -> None:
        self._num_calls = 0
        self._unanswered: dict[str, None] = {}

    def of_call(self, given: str | None) -> str:
        """Returns the id of the next call."""
        self._num_calls += 1
        call_id = given or f"call{self._num_calls:05d}"
        self._unanswered[call_id] = None
        return call_id

    def of_result(self, given: str | None) -> str:
        """Returns the id of the call that the next result is of; a new one if there is no call."""
        call_id = given or next(iter(self._unanswered), "") or self.of_call(None)
        self._unanswered.pop(call_id, None)
        return call_id


def _advice(messages: Sequence[Json], at: int) -> str:
    """Returns what to change about a message that a template refuses."""
    role, before = messages[at]["role"], messages[at - 1] if at else {}
    if role == _SYSTEM and at:
        return "move it to the beginning, or make it a user message"
    if role == _TOOL and not (before.get("tool_calls") or before.get("role") == _TOOL):
        return "put the assistant's call before this result, or make it a user message"
    if role == before.get("role"):
        return f"join it with the {role} message before it"
    return f"leave this {role} message out, or change it"


def split_prompts(prompt: Any) -> list[tuple[str, Any]]:
    """Returns (field name, text or token ids) of each prompt in the four shapes OpenAI allows."""
    if isinstance(prompt, str) or is_token_list(prompt):
        return [("prompt", prompt)]
    if not isinstance(prompt, list):
        raise InvalidRequestError("prompt", "must be a string, a list of strings, or one or more lists of token ids")
    if not prompt:
        raise InvalidRequestError("prompt", "must not be empty")
    if len(prompt) > MAX_CHOICES:
        raise InvalidRequestError("prompt", f"has {len(prompt)} entries, at most {MAX_CHOICES} are allowed")
    wanted = type(prompt[0])
    for index, entry in enumerate(prompt):
        if not isinstance(entry, str | list) or type(entry) is not wanted:
            raise InvalidRequestError(
                f"prompt[{index}]", "must be of one kind with the others: strings or lists of token ids"
            )
        if isinstance(entry, list) and entry and not is_token_list(entry):
            raise InvalidRequestError(f"prompt[{index}]", "must hold token ids, which are whole numbers")
    return [(f"prompt[{index}]", entry) for index, entry in enumerate(prompt)]


def is_token_list(value: Any) -> bool:
    """Tells whether a JSON value is a list of whole numbers, one at least."""
    return isinstance(value, list) and bool(value) and all(type(entry) is int for entry in value)


def chat_tokens(
    body: ChatFields,
    model: ServedModel,
    unknown: UnknownFields,
    keep_last: int | None = None,
    *,
    tools: Sequence[Json] = (),
    extra: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Returns the tokens of a chat by the model's template.

    Args:
        model: The template's model.
        unknown: Collects unknown fields of its messages.
        keep_last: How many of its last tokens are kept; None: all.
        tools: Tools for the template.
        extra: Variables of the template, over which those of the body win.

    Raises:
        InvalidRequestError: There is no template, it refuses the messages, or one of them is wrong or too long.
    """
    template = _template(body, model) or model.codec.own_template(with_tools=bool(tools))
    if template is None:
        raise InvalidRequestError(
            "messages", f"model {model.identity.name!r} has no chat template; use /v1/completions"
        )
    if not body.messages:
        raise InvalidRequestError("messages", "must hold at least one message")
    taken = TEMPLATE_NAMES & body.chat_template_kwargs.keys()
    if taken:
        raise InvalidRequestError(f"chat_template_kwargs.{min(taken)}", "is set by the server")
    if len(body.messages) > model.context_len:
        raise InvalidRequestError(
            "messages",
            f"has {len(body.messages)} entries, more than the context of {model.context_len} tokens holds",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequestError("add_generation_prompt", "must not be true with continue_final_message")
    asks = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    messages = plain_messages(body.messages, unknown)
    variables = {**(extra or {}), **body.chat_template_kwargs, **({"tools": list(tools)} if tools else {})}
    variables["add_generation_prompt"] = asks
    try:
        return model.codec.encode_chat(
            messages,
            variables,
            field="messages",
            context_len=model.context_len,
            keep_last=keep_last,
            template=template,
            continue_last=body.continue_final_message,
        )
    except TemplateRefusalError as error:
        refusal = partial(_refusal, template, variables)
        raise refused_at(messages, error.reason, refusal) from None


def _template(body: ChatFields, model: ServedModel) -> ChatTemplate | None:
    """Returns the chat template that a request brings; None: it brings none."""
    if body.chat_template is None:
        return None
    if not model.trusts_templates:
        raise InvalidRequestError("chat_template", "is not allowed here (--trust-request-chat-template allows it)")
    if len(body.chat_template) > MAX_TEMPLATE_CHARACTERS:
        raise InvalidRequestError("chat_template", f"must have at most {MAX_TEMPLATE_CHARACTERS} characters")
    try:
        return model.codec.template(body.chat_template)
    except ConfigError as error:
        raise InvalidRequestError("chat_template", str(error)) from error


def _refusal(template: ChatTemplate, variables: Mapping[str, Any], messages: Sequence[Json]) -> str:
    """Returns a template's words about messages that it refuses; empty: it takes them."""
    try:
        template.render(messages, variables)
    except TemplateRefusalError as error:
        return error.reason
    return ""
