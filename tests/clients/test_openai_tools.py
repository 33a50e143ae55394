"""Tools, reasoning and structured output of chats, with the official client."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Literal

import openai
import pytest
from chats import ANSWER, CALLS, QUESTION, TOOLS
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

USER: Any = {"role": "user", "content": QUESTION}
BOTH: Any = {"role": "user", "content": "Tell me both."}
NAMED: Any = {"type": "function", "function": {"name": "add"}}


class Place(BaseModel):
    """What an answer is parsed as."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["city", "village"]
    inhabitants: int = Field(ge=0, le=999)
    capital: bool | None


@cache
def client_of(served) -> OpenAI:
    return OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def demo(served):
    """Asks the model that knows no tools."""

    def ask(**fields: Any) -> Any:
        return client_of(served).chat.completions.create(
            **{"model": served.model, "messages": [USER], "max_tokens": 120, "seed": 2, **fields}
        )

    return ask


@pytest.fixture
def agent(caller):
    """Asks the model that calls tools."""

    def ask(*messages: Any, **fields: Any) -> Any:
        return client_of(caller).chat.completions.create(
            **{"model": caller.model, "messages": [*messages], "tools": TOOLS, **fields}
        )

    return ask


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_streamed_calls_join_to_the_whole_ones(served, demo, choice) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": choice}
    whole = demo(**asked).choices[0]
    fields: Any = {"model": served.model, "messages": [USER], "max_tokens": 120, "seed": 2, **asked}
    with client_of(served).chat.completions.stream(**fields) as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == whole.finish_reason
    whole_calls = [(each.function.name, each.function.arguments) for each in whole.message.tool_calls]
    assert [(each.function.name, each.function.arguments) for each in final.message.tool_calls] == whole_calls
    assert "".join(pieces) == "".join(arguments for _, arguments in whole_calls)


@pytest.mark.parametrize("replayed", ["object", "dump", "without nulls"])
def test_an_agent_calls_two_tools_and_answers(agent, tools, replayed) -> None:
    messages: list[Any] = [USER]
    while (choice := agent(*messages).choices[0]).finish_reason == "tool_calls":
        said = choice.message
        dumped = said.model_dump(exclude_none=replayed == "without nulls")
        messages.append(said if replayed == "object" else dumped)
        for call in said.tool_calls:
            result = tools.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert tools.calls == CALLS
    assert choice.message.content == ANSWER


def test_a_stream_tells_reasoning_text_and_calls_apart(agent) -> None:
    whole = agent(BOTH).choices[0].message
    deltas = [chunk.choices[0].delta for chunk in agent(BOTH, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    for field in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, field, None) or "" for delta in deltas) == "Both at once."
        assert getattr(whole, field) == "Both at once."
    told = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [call.function.name for call in told if call.function.name] == ["get_weather", "add"]
    for index, call in enumerate(whole.tool_calls):
        assert "".join(each.function.arguments for each in told if each.index == index) == call.function.arguments


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_every_effort_is_taken(agent, effort) -> None:
    assert agent(USER, reasoning_effort=effort).choices[0].message.tool_calls


def test_an_answer_is_parsed_as_a_model(served) -> None:
    asked: Any = {"model": served.model, "messages": [USER], "max_tokens": 120, "response_format": Place}
    for seed in range(3):
        answer = client_of(served).chat.completions.parse(**asked, seed=seed)
        assert isinstance(answer.choices[0].message.parsed, Place)


def test_an_object_grows_while_it_is_streamed(served) -> None:
    asked: Any = {"model": served.model, "messages": [USER], "max_tokens": 120, "response_format": Place}
    with client_of(served).chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        grown = [event.parsed for event in stream if event.type == "content.delta" and event.parsed]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Place)
    assert grown[-1] == final.choices[0].message.parsed.model_dump(mode="json")
    assert final.usage.total_tokens == final.usage.prompt_tokens + final.usage.completion_tokens


def test_a_tool_made_of_a_model_parses_its_arguments(served) -> None:
    asked: Any = {"model": served.model, "messages": [USER], "max_tokens": 120, "parallel_tool_calls": False}
    tool = openai.pydantic_function_tool(Place)
    answer = client_of(served).chat.completions.parse(**asked, tools=[tool], tool_choice="required")
    [call] = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Place)
