"""At every door, a format beside tools leaves room for a call, and the answer is read for calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from paceline.gateway.api.anthropic.bodies import MessagesBody
from paceline.gateway.api.anthropic.requests import generation_of
from paceline.gateway.api.openai.bodies import ChatBody, parse_body
from paceline.gateway.api.openai.choices import chat_sessions
from paceline.gateway.api.responses.bodies import ResponsesBody
from paceline.gateway.api.responses.requests import chat_of
from paceline.gateway.http.fields import UnknownFields, read_fields
from paceline.gateway.message.form import GPT_OSS, HERMES, Families
from paceline.gateway.sessions.request import SessionRequest
from tests.support.openai_bodies import MODEL

Json = dict[str, Any]
SCHEMA: Json = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
FUNCTION: Json = {"name": "f", "parameters": {"type": "object", "properties": {}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": FUNCTION}]}
ASKED: list[tuple[str, Json]] = [
    ("chat", {**CHAT, "response_format": FORMAT}),
    ("chat", {**CHAT, "response_format": {"type": "json_object"}}),
    ("chat", {**CHAT, "structured_outputs": {"json": SCHEMA}}),
    (
        "response",
        {
            "input": "hi",
            "tools": [{"type": "function", **FUNCTION}],
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
        },
    ),
    (
        "message",
        {
            "messages": CHAT["messages"],
            "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}],
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
]


def session(door: str, fields: Json, families: Families) -> SessionRequest:
    unknown = UnknownFields(strict=False)
    fields = {"model": "m", **fields}
    if door == "response":
        fields, _ = chat_of(read_fields(ResponsesBody, fields, unknown), [], unknown)
    elif door == "message":
        fields, _ = generation_of(read_fields(MessagesBody, {"max_tokens": 9, **fields}, unknown), unknown)
    model = replace(MODEL, families=families, identity=replace(MODEL.identity, context_len=4000))
    [made] = chat_sessions(parse_body(ChatBody, {**fields, "model": "m"}, unknown), model, "chatcmpl-1", unknown)
    return made


def accepts(grammar: str, text: str) -> bool:
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(("door", "fields"), ASKED)
def test_the_answer_has_the_format_or_is_a_call(door: str, fields: Json) -> None:
    """vLLM #39929: a format bound the whole answer, so no tool was ever called."""
    made = session(door, fields, Families(tool_calls=HERMES))
    assert made.form is not None
    assert made.form.tool_calls == HERMES
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    texts = ('{"n": 1}', call, "hello", f"hello{call}")
    assert [accepts(made.sampling.grammar, text) for text in texts] == [True, True, False, False]


def test_without_a_choice_of_calls_the_format_binds_all() -> None:
    made = session("chat", {**CHAT, "response_format": FORMAT, "tool_choice": "none"}, Families(tool_calls=HERMES))
    assert made.form is None
    assert [accepts(made.sampling.grammar, text) for text in ('{"n": 1}', "<tool_call>")] == [True, False]


def test_a_family_whose_calls_no_grammar_knows_writes_the_format_alone() -> None:
    made = session("chat", {**CHAT, "response_format": FORMAT}, Families(reasoning=GPT_OSS))
    assert accepts(made.sampling.grammar, '{"n": 1}')
