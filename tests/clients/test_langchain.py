"""LangChain over both of OpenAI's APIs: text, streams, structured output, and an agent with two tools."""

from __future__ import annotations

from typing import Any

import pytest
from chats import ANSWER, CALLS, QUESTION
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field


class Weather(BaseModel):
    """How the weather will be."""

    model_config = ConfigDict(extra="forbid")

    rain: bool
    degrees: int = Field(ge=0, le=99)


def chat_model(served, **settings: Any) -> ChatOpenAI:
    given: Any = {"max_tokens": 80, "seed": 7, "max_retries": 0, "timeout": 120, **settings}
    return ChatOpenAI(base_url=served.v1, api_key="none", model=served.model, **given)


def tools_of(tools) -> list[StructuredTool]:
    return [StructuredTool.from_function(each) for each in (tools.get_weather, tools.add)]


@pytest.mark.parametrize("kind", [ChatOpenAI, OpenAI])
def test_a_stream_joins_to_the_whole(served, kind) -> None:
    model = kind(base_url=served.v1, api_key="none", model=served.model, max_tokens=16, seed=7, max_retries=0)
    text = [getattr(each, "content", each) for each in (model.invoke("Hello"), *model.stream("Hello"))]
    assert text[0]
    assert "".join(text[1:]) == text[0]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_its_class(served, method) -> None:
    model = chat_model(served).with_structured_output(Weather, method=method)
    assert isinstance(model.invoke("Will it rain?"), Weather)


@pytest.mark.parametrize("api", ["completions", "responses"])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_calls_two_tools_and_answers(caller, tools, api, streamed) -> None:
    settings: Any = {"use_responses_api": True, "output_version": "responses/v1", "seed": None}
    bound = chat_model(caller, **(settings if api == "responses" else {})).bind_tools(tools_of(tools))
    by_name = {each.name: each for each in tools_of(tools)}

    def ask(messages: list[Any]) -> Any:
        if not streamed:
            return bound.invoke(messages)
        first, *rest = bound.stream(messages)
        assert isinstance(first, AIMessageChunk)
        return sum(rest, first)

    messages: list[Any] = [HumanMessage(QUESTION)]
    while (said := ask(messages)).tool_calls:
        messages += [said, *(by_name[call["name"]].invoke(call) for call in said.tool_calls)]
    assert tools.calls == CALLS
    assert said.text == ANSWER


def test_the_responses_api_keeps_a_conversation(served) -> None:
    model = chat_model(served, use_responses_api=True, use_previous_response_id=True, seed=None)
    first = model.invoke("Hello")
    again = model.invoke([HumanMessage("Hello"), first, HumanMessage("And then?")])
    assert again.text
    assert again.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]
