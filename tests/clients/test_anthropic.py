"""Anthropic's official client: messages whole and streamed, tools, counts, and its own kinds of errors."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Literal

import anthropic
import pytest
from anthropic import Anthropic
from chats import ANSWER, CALLS, PARAMETERS, QUESTION
from pydantic import BaseModel

USER: Any = {"role": "user", "content": QUESTION}
BOTH: Any = {"role": "user", "content": "Tell me both."}
TOOLS: Any = [{"name": name, "input_schema": each} for name, each in PARAMETERS.items()]


class Weather(BaseModel):
    """What an answer is parsed as."""

    rain: bool
    sky: Literal["clear", "cloudy"]


@cache
def client_of(served) -> Anthropic:
    return Anthropic(base_url=served.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def demo(served):
    """Asks the model that knows no tools."""

    def ask(**fields: Any) -> Any:
        asked: Any = {"model": served.model, "messages": [USER], "max_tokens": 16, "extra_body": {"seed": 2}, **fields}
        return client_of(served).messages.create(**asked)

    return ask


@pytest.fixture
def agent(caller):
    """Asks the model that calls tools."""

    def ask(*messages: Any, **fields: Any) -> Any:
        asked: Any = {"model": caller.model, "messages": [*messages], "max_tokens": 120, "tools": TOOLS, **fields}
        return client_of(caller).messages.create(**asked)

    return ask


def shape(message: Any) -> list[Any]:
    """What a message says, without what tells two of them apart."""
    return [message.stop_reason, [block.model_dump(exclude={"id"}) for block in message.content]]


def test_a_stream_joins_to_the_whole_message(served, demo) -> None:
    whole = demo(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 16)
    asked: Any = {"model": served.model, "messages": [USER], "max_tokens": 16, "system": "Be brief."}
    with client_of(served).messages.stream(**asked, extra_body={"seed": 2}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert shape(final) == shape(whole)
    assert final.usage.output_tokens == 16


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_two_tools_and_answers(caller, agent, tools, streamed) -> None:
    def ask(messages: list[Any]) -> Any:
        if not streamed:
            return agent(*messages)
        asked: Any = {"model": caller.model, "messages": messages, "max_tokens": 120, "tools": TOOLS}
        with client_of(caller).messages.stream(**asked) as stream:
            return stream.get_final_message()

    messages: list[Any] = [USER]
    while (message := ask(messages)).stop_reason == "tool_use":
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": tools.call(block.name, block.input)}
            for block in message.content
            if block.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert tools.calls == CALLS
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[1].text == ANSWER


def test_the_client_s_own_tool_runner_goes_through_all_calls(caller, tools) -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The degrees in a city."""
        return tools.get_weather(city)

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """The sum of two numbers."""
        return str(tools.add(a, b))

    runner = client_of(caller).beta.messages.tool_runner(
        model=caller.model, max_tokens=120, messages=[USER], tools=[get_weather, add]
    )
    assert runner.until_done().content[-1].text == ANSWER
    assert tools.calls == CALLS


def test_a_stream_tells_blocks_of_each_kind(caller, agent) -> None:
    asked: Any = {"model": caller.model, "messages": [BOTH], "max_tokens": 120, "tools": TOOLS}
    kinds = []
    with client_of(caller).messages.stream(**asked) as stream:
        for event in stream:
            kinds += [event.content_block.type] if event.type == "content_block_start" else []
        final = stream.get_final_message()
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert shape(final) == shape(agent(BOTH))


def test_an_answer_is_parsed_as_a_model(served) -> None:
    asked: Any = {"model": served.model, "messages": [USER], "max_tokens": 60, "output_format": Weather}
    assert isinstance(client_of(served).messages.parse(**asked).parsed_output, Weather)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "strange"}, anthropic.NotFoundError),
        ({"max_tokens": 0}, anthropic.BadRequestError),
        ({"max_tokens": 10**6}, anthropic.BadRequestError),
        ({"messages": []}, anthropic.BadRequestError),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
            anthropic.BadRequestError,
        ),
        ({"messages": [{"role": "user", "content": "x" * 5_000_000}]}, anthropic.RequestTooLargeError),
    ],
)
def test_refusals_are_the_client_s_own_errors(demo, fields, kind) -> None:
    with pytest.raises(kind) as refused:
        demo(**fields)
    assert refused.value.body["type"] == "error"
    assert refused.value.request_id
    assert refused.value.body["error"]["type"] in json.dumps(refused.value.body)


def test_models_are_listed(served) -> None:
    assert [each.id for each in client_of(served).models.list()] == [served.model]
