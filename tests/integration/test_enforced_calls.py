"""Calls that have to be made: the demo model, which knows no tools, makes them under a grammar."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from tests.support.demo_gateway import demo_gateway

USER: Any = {"role": "user", "content": "Write a function that adds two numbers."}
WHERE = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99}}, "required": ["x"]}
MOVE: Any = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/where"}, "how": {"enum": ["fast", "slow"]}},
    "required": ["to", "how"],
    "additionalProperties": False,
    "$defs": {"where": {**WHERE, "additionalProperties": False}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "move", "parameters": MOVE}},
    {"type": "function", "function": {"name": "rest"}},
]
NAMED: Any = {"type": "function", "function": {"name": "move"}}


# Its answers begin within reasoning.
THINKS = "{{ messages[-1].content }}<think>\n"


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[AsyncOpenAI]:
    """A client of a gateway with these settings."""
    async with (
        demo_gateway(**settings) as url,
        AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=False, trust_env=False),
        ) as client,
    ):
        yield client


@pytest.fixture
async def openai() -> AsyncIterator[AsyncOpenAI]:
    async with served() as client:
        yield client


async def test_a_call_that_is_required_is_made_as_the_schema_wants_it(openai: AsyncOpenAI) -> None:
    fields: Any = {"tools": TOOLS, "max_tokens": 100, "seed": 3, "parallel_tool_calls": False}
    whole = await openai.chat.completions.create(model="tiny", messages=[USER], tool_choice="required", **fields)
    choice = whole.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    schema = MOVE if call.function.name == "move" else {"type": "object"}
    jsonschema_rs.Draft202012Validator(schema).validate(json.loads(call.function.arguments))
    stream = openai.chat.completions.stream(model="tiny", messages=[USER], tool_choice="required", **fields)
    async with stream as events:
        streamed = (await events.get_final_completion()).choices[0].message.tool_calls or []
    assert [(each.function.name, each.function.arguments) for each in streamed] == [
        (call.function.name, call.function.arguments)
    ]


async def test_the_named_tool_is_called_with_arguments_of_its_schema(openai: AsyncOpenAI) -> None:
    for seed in range(3):
        answer = await openai.chat.completions.create(
            model="tiny", messages=[USER], tools=TOOLS, tool_choice=NAMED, max_tokens=100, seed=seed
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "move"
        jsonschema_rs.Draft202012Validator(MOVE).validate(json.loads(call.function.arguments))


async def test_a_call_that_is_required_waits_for_the_end_of_reasoning() -> None:
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "seed": 3, "messages": [USER], "model": "tiny"}
    async with served(reasoning_parser="qwen3", trust_request_chat_template=True) as openai:
        begun = await openai.chat.completions.create(max_tokens=20, extra_body={"chat_template": THINKS}, **fields)
        closed = {"chat_template": f"{THINKS}hm</think>"}
        called = await openai.chat.completions.create(max_tokens=100, extra_body=closed, **fields)
    message: Any = begun.choices[0].message
    assert (begun.choices[0].finish_reason, message.tool_calls) == ("length", None)
    assert message.reasoning_content
    assert called.choices[0].message.tool_calls


NO_TYPE: Any = {"type": "object", "properties": {"a": {"type": "magic"}}}
STRICT: Any = {"name": "f", "parameters": NO_TYPE, "strict": True}
TEXT: Any = {"model": "tiny", "prompt": "x", "max_tokens": 2}
CHAT: Any = {"model": "tiny", "messages": [USER], "max_tokens": 2}
# Path, body, and the field that the refusal names.
REFUSED: list[tuple[str, Any, str]] = [
    ("completions", {**TEXT, "structured_outputs": {"json": NO_TYPE}}, "structured_outputs.json"),
    ("completions", {**TEXT, "structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ("completions", {**TEXT, "structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar"),
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NO_TYPE}}},
        "response_format.json_schema.schema",
    ),
    (
        "chat/completions",
        {**CHAT, "tools": [{"type": "function", "function": STRICT}], "tool_choice": "required"},
        "tools",
    ),
    (
        "responses",
        {
            "model": "tiny",
            "input": "x",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": NO_TYPE}},
        },
        "text.format.schema",
    ),
    (
        "messages",
        {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": NO_TYPE}}},
        "output_config.format.schema",
    ),
]


async def test_a_grammar_that_no_verifier_compiles_is_refused_by_its_field_before_the_first_byte() -> None:
    async with (
        demo_gateway() as url,
        httpx.AsyncClient(base_url=f"{url}/v1", verify=False, trust_env=False, timeout=60) as client,
    ):
        for path, body, field in REFUSED:
            for streamed in (False, True):
                answer = await client.post(f"/{path}", json={**body, "stream": streamed})
                message = answer.json()["error"]["message"]
                assert (answer.status_code, message.split(":")[0]) == (400, field), (path, streamed)
