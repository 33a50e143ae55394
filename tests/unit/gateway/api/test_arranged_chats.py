"""Chats of all three doors become prompts that the model's template takes, and ids of calls come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from paceline.gateway.api.anthropic.bodies import MessagesBody
from paceline.gateway.api.anthropic.requests import generation_of
from paceline.gateway.api.openai.bodies import ChatBody, parse_body
from paceline.gateway.api.openai.choices import chat_sessions
from paceline.gateway.api.responses.bodies import ResponsesBody
from paceline.gateway.api.responses.requests import chat_of, output_messages
from paceline.gateway.fleet.served_model import ServedModel
from paceline.gateway.http.fields import UnknownFields, read_fields
from paceline.gateway.message.form import HERMES, MISTRAL, Families, MessageForm
from paceline.gateway.message.growing import Message
from paceline.gateway.sessions.request import SessionRequest
from paceline.gateway.text.chat_template import ChatTemplate
from paceline.gateway.text.codec import TextCodec
from tests.support import tiny_tokenizer
from tests.support.openai_bodies import MODEL
from tests.support.template_chats import BOS, EOS, OWN_TEMPLATES

Json = dict[str, Any]
Door = Callable[[ServedModel, Json], SessionRequest]
SESSION_ID = "chatcmpl-1-0"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


def model(name: str, with_tools: str = "") -> ServedModel:
    codec = TextCodec(
        tiny_tokenizer.train(), template(name), tool_template=template(with_tools) if with_tools else None
    )
    return replace(
        MODEL,
        codec=codec,
        identity=replace(MODEL.identity, context_len=2000),
        families=Families.of("auto", "auto", codec.template_source),
    )


def template(name: str) -> ChatTemplate:
    source = (OWN_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return ChatTemplate(source, {"bos_token": BOS, "eos_token": EOS})


def prompt(session: SessionRequest) -> str:
    return session.model.codec.decode(session.prompt_token_ids, special_tokens=True)


def chat(model: ServedModel, fields: Json) -> SessionRequest:
    unknown = UnknownFields(strict=False)
    [session] = chat_sessions(parse_body(ChatBody, {"model": "m", **fields}, unknown), model, "chatcmpl-1", unknown)
    return session


def response(model: ServedModel, fields: Json, earlier: list[Json] | None = None) -> SessionRequest:
    unknown = UnknownFields(strict=False)
    body = read_fields(ResponsesBody, {"model": "m", **fields}, unknown)
    fields, _ = chat_of(body, earlier or [], unknown)
    return chat(model, fields)


def message(model: ServedModel, fields: Json) -> SessionRequest:
    unknown = UnknownFields(strict=False)
    body = read_fields(MessagesBody, {"model": "m", "max_tokens": 9, **fields}, unknown)
    fields, _ = generation_of(body, unknown)
    return chat(model, fields)


def said(role: str, content: str) -> Json:
    return {"role": role, "content": content}


UNRULY: list[tuple[Door, Json]] = [
    (
        chat,
        {"messages": [said("system", "one"), said("developer", "two"), said("user", "hi"), said("system", "three")]},
    ),
    (
        response,
        {"instructions": "one", "input": [said("developer", "two"), said("user", "hi"), said("developer", "three")]},
    ),
    (message, {"system": "one", "messages": [said("system", "two"), said("user", "hi"), said("system", "three")]}),
]


@pytest.mark.parametrize(("door", "fields"), UNRULY)
@pytest.mark.parametrize(
    ("template", "begin"),
    [
        ("system_first", "<|system|>one\n\ntwo\n\nthree<|end|><|user|>hi<|end|>"),
        ("alternating", "<|begin|><|user|>\none\n\ntwo\n\nthree\n\nhi<|end|>\n"),
        ("parts", "System: one\nSystem: two\nUser: hi\nSystem: three\n"),
    ],
)
def test_system_messages_in_any_order_are_served_at_every_door(
    door: Door, fields: Json, template: str, begin: str
) -> None:
    """ollama #17774, vLLM #41114, #48874: agents send them in the middle, beside instructions, and several."""
    assert prompt(door(model(template), fields)).startswith(begin)


TOOLS_OF: list[tuple[Door, Json, Json]] = [
    (chat, {"messages": [said("user", "hi")]}, {"type": "function", "function": {"name": "weather"}}),
    (response, {"input": "hi"}, {"type": "function", "name": "weather", "parameters": PARAMETERS}),
    (message, {"messages": [said("user", "hi")]}, {"name": "weather", "input_schema": PARAMETERS}),
]


@pytest.mark.parametrize(("door", "fields", "tool"), TOOLS_OF)
def test_the_template_for_tools_is_used_with_tools_alone(door: Door, fields: Json, tool: Json) -> None:
    """vLLM #5309, transformers #31429: with the other one, the model never learned of its tools."""
    two = model("named_default", "named_tool_use")
    assert two.families.tool_calls == HERMES
    assert "<|tools|>" not in prompt(door(two, fields))
    with_tools = prompt(door(two, {**fields, "tools": [tool]}))
    assert with_tools.startswith("<|begin|><|tools|>")
    assert "weather" in with_tools


def called(session: SessionRequest) -> Json:
    """Returns what the model's answer to a session becomes when it calls a tool."""
    assert session.form is not None
    growing, reader = Message(session.form, session.session_id), session.form.reader()
    growing.take(reader.feed('[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bern"}}]'))
    growing.take(reader.finish())
    return growing.whole()


def by_chat(model: ServedModel) -> tuple[str, str]:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    first = chat(model, {"messages": [said("user", "hi")], "tools": tools})
    answer = called(first)
    call_id = answer["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": call_id, "content": "sunny"}
    messages = [said("user", "hi"), {"role": "assistant", **answer}, result]
    return call_id, prompt(chat(model, {"messages": messages, "tools": tools}))


def by_responses(model: ServedModel, *, named: bool) -> tuple[str, str]:
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    call = called(response(model, {"input": "hi", "tools": tools}))["tool_calls"][0]
    item = {"type": "function_call", "call_id": call["id"], **call["function"]}
    result = {"type": "function_call_output", "call_id": call["id"], "output": "sunny"}
    if named:
        earlier = [said("user", "hi"), *output_messages([item])]
        return call["id"], prompt(response(model, {"input": [result], "tools": tools}, earlier))
    return call["id"], prompt(response(model, {"input": [said("user", "hi"), item, result], "tools": tools}))


def by_messages(model: ServedModel) -> tuple[str, str]:
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    call = called(message(model, {"messages": [said("user", "hi")], "tools": tools}))["tool_calls"][0]
    arguments = json.loads(call["function"]["arguments"])
    use = {"type": "tool_use", "id": call["id"], "name": "weather", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
    turns = [said("user", "hi"), {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return call["id"], prompt(message(model, {"messages": turns, "tools": tools}))


@pytest.mark.parametrize(
    "talk",
    [by_chat, partial(by_responses, named=False), partial(by_responses, named=True), by_messages],
    ids=["chat", "items", "previous_response_id", "messages"],
)
def test_an_id_that_was_handed_out_comes_back_as_it_was(talk: Callable[[ServedModel], tuple[str, str]]) -> None:
    """mlx-lm #1375, vLLM #9019: Mistral's templates refused the ids of the server's own answers."""
    mistral = model("nine_characters")
    assert mistral.families.tool_calls == MISTRAL
    call_id, second = talk(mistral)
    assert len(call_id) == 9
    assert call_id.isalnum()
    assert f'"id": "{call_id}"' in second
    assert f'"call_id": "{call_id}"' in second


def test_ids_are_short_for_templates_alone_that_take_no_others_and_by_enforced_calls_too() -> None:
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    fields = {"messages": [said("user", "hi")], "tools": tools, "tool_choice": "required"}
    for name, short in (("nine_characters", True), ("system_first", False)):
        form = chat(model(name), fields).form
        assert form is not None
        assert (form.enforced, form.short_ids) == (True, short)
        assert MessageForm.from_json(form.to_json()) == form
