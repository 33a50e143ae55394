"""Prompts of OpenAI's bodies: texts, token ids, and chats by the model's template.

It knows the bodies and the tokenizer; it does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from paceline.core.errors import ConfigError, InvalidRequestError
from paceline.gateway.api.openai.bodies import TEMPLATE_NAMES, ChatFields
from paceline.gateway.api.openai.history import plain_messages, refused_at
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.http.fields import UnknownFields
from paceline.gateway.message.schemas import Json
from paceline.gateway.sessions.request import MAX_CHOICES, MAX_TEMPLATE_CHARACTERS
from paceline.gateway.text.chat_template import ChatTemplate, TemplateRefusalError


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
        model: Whose template it is.
        unknown: Collects unknown fields of its messages.
        keep_last: How many of its last tokens are kept; None: all.
        tools: Those that the template gets.
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
