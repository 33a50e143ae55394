"""/v1/responses with the official client: text, tools, structured output, streams, and what is kept."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import openai
import pytest
from chats import ANSWER, CALLS, PARAMETERS, QUESTION
from openai import OpenAI
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

TOOLS: Any = [
    {"type": "function", "name": name, "parameters": each, "strict": True} for name, each in PARAMETERS.items()
]


class Answer(BaseModel):
    """What an answer is parsed as."""

    yes: bool
    degrees: int = Field(ge=0, le=99)


@cache
def client_of(served) -> OpenAI:
    return OpenAI(base_url=served.v1, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def demo(served):
    """Asks the model that knows no tools."""

    def ask(**fields: Any) -> Any:
        return client_of(served).responses.create(
            **{"model": served.model, "input": "Hello", "max_output_tokens": 16, "extra_body": {"seed": 3}, **fields}
        )

    return ask


@pytest.fixture
def agent(caller):
    """Asks the model that calls tools."""

    def ask(**fields: Any) -> Any:
        return client_of(caller).responses.create(
            **{"model": caller.model, "input": QUESTION, "tools": TOOLS, "temperature": 0, **fields}
        )

    return ask


def shape(response: Any) -> list[Any]:
    """What a response says, without what tells two of them apart."""
    items = [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
    return [response.status, response.incomplete_details, items]


def test_a_stream_of_official_events_ends_with_the_whole(demo) -> None:
    events = list(demo(stream=True))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump())
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.incomplete"
    told = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert told == events[-1].response.output_text == demo().output_text


def test_a_stream_of_calls_tells_items_of_each_kind(agent) -> None:
    events = list(agent(input="Both, please: both.", stream=True))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.model_dump())
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    done = [event.arguments for event in events if event.type == "response.function_call_arguments.done"]
    assert done == [item.arguments for item in final.output[2:]]
    assert shape(final) == shape(agent(input="Both, please: both."))
    assert 0 < final.usage.output_tokens_details.reasoning_tokens < final.usage.output_tokens


@pytest.mark.parametrize("kept", [True, False])
def test_an_agent_calls_two_tools_and_answers(agent, tools, kept) -> None:
    """By the id of the response before, or with all items replayed."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    response = agent(store=kept)
    while calls := [item for item in response.output if item.type == "function_call"]:
        results = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": tools.call(call.name, json.loads(call.arguments)),
            }
            for call in calls
        ]
        items += [*response.output, *results]
        fields: Any = {"input": results, "previous_response_id": response.id} if kept else {"input": items}
        response = agent(store=kept, **fields)
    assert tools.calls == CALLS
    assert response.output_text == ANSWER


def test_an_answer_is_parsed_as_a_model(served) -> None:
    asked: Any = {"model": served.model, "input": "Is it warm?", "max_output_tokens": 60, "text_format": Answer}
    assert isinstance(client_of(served).responses.parse(**asked).output_parsed, Answer)
    with client_of(served).responses.stream(**asked) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Answer)


def test_a_tool_made_of_a_model_parses_its_arguments(served) -> None:
    tools: Any = [openai.pydantic_function_tool(Answer)]
    asked: Any = {"model": served.model, "input": "Is it warm?", "max_output_tokens": 60, "tools": tools}
    response = client_of(served).responses.parse(**asked, tool_choice="required", parallel_tool_calls=False)
    [call] = response.output
    assert isinstance(call.parsed_arguments, Answer)
