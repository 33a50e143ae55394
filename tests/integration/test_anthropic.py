"""Anthropic's API at the gateway, with its official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic, BadRequestError, DefaultAsyncHttpxClient, NotFoundError

from paceline.gateway.api.anthropic.bodies import CountBody
from paceline.gateway.api.anthropic.requests import prompt_of
from paceline.gateway.http.fields import UnknownFields, read_fields
from tests.integration.test_tool_calls import CALLS, PARSERS, THOUGHT, says
from tests.support.demo_gateway import demo_gateway
from tests.support.scripted_fleet import MODEL, SHARES_A_GATEWAY, Script, ScriptedFleet

pytestmark = SHARES_A_GATEWAY
GATEWAY = PARSERS

USER: Any = {"role": "user", "content": "hello"}
TOOL: Any = {"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}}}


def client_of(url: str) -> AsyncAnthropic:
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return AsyncAnthropic(base_url=url, api_key="none", max_retries=0, http_client=http)


@pytest_asyncio.fixture(loop_scope="module")
async def anthropic(fleet: ScriptedFleet) -> AsyncIterator[AsyncAnthropic]:
    async with client_of(f"http://{fleet.addresses.http}") as client:
        yield client


async def asked(client: AsyncAnthropic, **fields: Any) -> Any:
    return await client.messages.create(**{"model": MODEL, "max_tokens": 200, "messages": [USER], **fields})


async def test_an_answer_is_blocks_of_thinking_text_and_tool_use(
    fleet: ScriptedFleet, anthropic: AsyncAnthropic
) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}")
    answer = await asked(anthropic, tools=[TOOL])
    assert [block.type for block in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (answer.content[0].thinking, answer.content[1].text) == ("hm", "So:")
    assert [block.input for block in answer.content[2:]] == [{"a": 1}, {}]
    assert answer.stop_reason == "tool_use"
    tokens = fleet.verifier.requests[0].prompt_token_ids
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(tokens)


@pytest.mark.parametrize("step_len", [1, 4, 200])
async def test_a_stream_adds_up_to_the_whole_message(
    fleet: ScriptedFleet, anthropic: AsyncAnthropic, step_len: int
) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}", step_len)
    whole = await asked(anthropic, tools=[TOOL])
    async with anthropic.messages.stream(model=MODEL, max_tokens=200, messages=[USER], tools=[TOOL]) as stream:
        streamed = await stream.get_final_message()

    def contents(message: Any) -> Any:
        told = message.model_dump(exclude={"id", "metrics"})
        return [{name: each[name] for name in each if name not in ("id", "parsed_output")} for each in told["content"]]

    assert contents(streamed) == contents(whole)
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


async def test_a_conversation_with_tools_becomes_that_of_a_chat(
    fleet: ScriptedFleet, anthropic: AsyncAnthropic
) -> None:
    await asked(
        anthropic,
        max_tokens=3,
        system=[{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        messages=[USER, {"role": "assistant", "content": [{"type": "text", "text": "hi"}]}, USER],
    )
    system: Any = {"role": "system", "content": "be brief"}
    said: Any = {"role": "assistant", "content": "hi"}
    await fleet.openai.chat.completions.create(model=MODEL, messages=[system, USER, said, USER], max_tokens=3)
    first, second = fleet.verifier.requests
    assert first.prompt_token_ids == second.prompt_token_ids
    result = {"type": "tool_result", "tool_use_id": "t", "content": "1"}
    with pytest.raises(BadRequestError, match="no tools here"):
        await asked(anthropic, messages=[USER, {"role": "user", "content": [result]}])


async def test_the_stop_sequence_that_ended_a_message_is_named(fleet: ScriptedFleet, anthropic: AsyncAnthropic) -> None:
    says(fleet, "one two three")
    answer = await asked(anthropic, stop_sequences=["zzz", "two"])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", "two", "one ")
    fleet.verifier.script = Script()
    assert (await asked(anthropic, max_tokens=3)).stop_reason == "max_tokens"


async def test_an_answer_goes_on_with_what_the_assistant_has_said_last(
    fleet: ScriptedFleet, anthropic: AsyncAnthropic
) -> None:
    for content in ("So", [{"type": "text", "text": "So"}]):
        begun = {"role": "assistant", "content": content}
        await asked(anthropic, messages=[USER, begun], max_tokens=1)
        counted = await anthropic.messages.count_tokens(model=MODEL, messages=[USER, begun])
        tokens = fleet.verifier.requests[-1].prompt_token_ids
        assert fleet.codec.decode(tokens, special_tokens=True).endswith("<|assistant|>So")
        assert counted.input_tokens == len(tokens)


async def test_tokens_are_counted_as_they_are_when_served(fleet: ScriptedFleet, anthropic: AsyncAnthropic) -> None:
    await asked(anthropic, max_tokens=1, system="be brief")
    counting = anthropic.messages.with_raw_response.count_tokens
    counted = await counting(model=MODEL, messages=[USER], system="be brief")
    assert "x-paceline-ignored-fields" not in counted.headers
    assert (await counted.parse()).input_tokens == len(fleet.verifier.requests[0].prompt_token_ids)


async def test_errors_have_anthropic_s_shape(fleet: ScriptedFleet, anthropic: AsyncAnthropic) -> None:
    with pytest.raises(NotFoundError) as missing:
        await asked(anthropic, model="strange")
    assert missing.value.type == "not_found_error"
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(BadRequestError, match=r"messages\[0\].content\[0\].type: 'image' is not supported"):
        await asked(anthropic, messages=[{"role": "user", "content": [image]}])
    assert fleet.verifier.requests == []


async def test_every_answer_has_its_id_where_the_official_client_looks(
    fleet: ScriptedFleet, anthropic: AsyncAnthropic
) -> None:
    answer = await anthropic.messages.with_raw_response.create(model=MODEL, max_tokens=1, messages=[USER])
    count = await anthropic.messages.with_raw_response.count_tokens(model=MODEL, messages=[USER])
    for headers in (answer.headers, count.headers):
        assert headers["request-id"] == headers["x-request-id"]
    with pytest.raises(NotFoundError) as missing:
        await asked(anthropic, model="strange")
    assert missing.value.request_id
    assert "request-id" not in (await fleet.http.post("/v1/chat/completions", json={"messages": [USER]})).headers


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_so_that_the_client_sends_the_whole_conversation(
    fleet: ScriptedFleet, anthropic: AsyncAnthropic, thread: dict[str, Any]
) -> None:
    with pytest.raises(BadRequestError) as refused:
        await asked(anthropic, extra_body={"thread": thread})
    body: Any = refused.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request"}
    assert fleet.verifier.requests == []


async def test_effort_and_thinking_are_told_to_the_template() -> None:
    unknown = UnknownFields(strict=True)
    fields = {"messages": [USER], "output_config": {"effort": "low"}, "thinking": {"type": "disabled"}}
    chat, _ = prompt_of(read_fields(CountBody, fields, unknown), unknown)
    assert chat["chat_template_kwargs"] == {"reasoning_effort": "low", "enable_thinking": False}


async def test_the_form_of_an_answer_is_enforced() -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    async with demo_gateway() as url, client_of(url) as client:
        answer = await asked(client, output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=60)
        assert json.loads(answer.content[0].text)["n"] in (1, 2)
        with pytest.raises(BadRequestError, match="yaml"):
            await asked(client, output_config={"format": {"type": "yaml", "schema": schema}})


async def test_any_tool_is_called_under_a_grammar() -> None:
    async with demo_gateway() as url, client_of(url) as client:
        answer = await asked(client, tools=[TOOL], tool_choice={"type": "tool", "name": "f"}, max_tokens=60)
        [block] = answer.content
        assert (block.type, block.name) == ("tool_use", "f")
        assert answer.stop_reason in ("tool_use", "max_tokens")
