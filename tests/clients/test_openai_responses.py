"""/v1/responses with the official client: text, tools, structured output, streams, and what is kept."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import openai
import pytest
from chats import ANSWER, CALLS, PARAMETERS, QUESTION
from openai import BadRequestError, NotFoundError, OpenAI
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


def test_a_response_is_cut_where_it_was_asked_to_be(demo) -> None:
    response = demo(instructions="Be brief.", metadata={"case": "1"})
    assert response.output_text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.usage.output_tokens == 16
    assert (response.instructions, response.metadata) == ("Be brief.", {"case": "1"})


@pytest.mark.parametrize(
    "given",
    [
        [{"role": "user", "content": "Hello"}],
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}],
    ],
)
def test_an_input_in_items_is_the_same_as_its_text(demo, given) -> None:
    assert shape(demo(input=given)) == shape(demo())


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


ADD: Any = {"type": "function", "name": "add"}


@pytest.mark.parametrize("choice", ["required", ADD, {"type": "allowed_tools", "mode": "required", "tools": [ADD]}])
def test_calls_are_enforced(demo, choice) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 120}
    response = demo(**asked)
    assert response.status == "completed"
    assert {item.type for item in response.output} == {"function_call"}
    assert {*json.loads(response.output[0].arguments)} == {*PARAMETERS[response.output[0].name]["required"]}
    assert list(demo(**asked, stream=True))[-1].response.output[0].name == response.output[0].name


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


def test_a_schema_in_the_text_format_is_kept_to(demo) -> None:
    schema = {**Answer.model_json_schema(), "additionalProperties": False}
    told: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    Answer.model_validate_json(demo(text=told, max_output_tokens=60).output_text)


def test_a_kept_response_is_retrieved_replayed_and_deleted(caller, agent) -> None:
    client = client_of(caller)
    events = list(agent(stream=True))
    response = events[-1].response
    assert client.responses.retrieve(response.id) == response
    for after in (0, 5, len(events) - 3):
        number = events[after].sequence_number
        rest = list(client.responses.retrieve(response.id, stream=True, starting_after=number))
        assert rest[0].sequence_number > number
        assert rest[-1].response == response
        told = [event for event in events if event.sequence_number > number]
        for kind in ("response.function_call_arguments.delta", "response.reasoning_text.delta"):
            replayed, seen = ("".join(e.delta for e in each if e.type == kind) for each in (rest, told))
            assert replayed == seen
    client.responses.delete(response.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(response.id)


def test_what_is_not_stored_is_not_known_later(served, demo) -> None:
    response = demo(store=False)
    with pytest.raises(NotFoundError):
        client_of(served).responses.retrieve(response.id)
    with pytest.raises(NotFoundError):
        demo(previous_response_id=response.id)


def test_a_response_that_runs_is_cancelled(served, demo) -> None:
    client = client_of(served)
    with demo(stream=True, max_output_tokens=1500, extra_body={"ignore_eos": True}) as stream:
        begun = next(iter(stream)).response
        assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"


def test_a_stream_that_broke_off_goes_on_behind_its_last_event(served, demo) -> None:
    asked: Any = {"max_output_tokens": 200, "temperature": 0}
    whole = list(demo(**asked, stream=True))
    with demo(**asked, stream=True) as stream:
        events = iter(stream)
        seen = [next(events) for _ in range(8)]
    response_id = seen[0].response.id
    rest = list(client_of(served).responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number))
    told = ["".join(e.delta for e in each if e.type == "response.output_text.delta") for each in (whole, seen, rest)]
    assert told[0] == told[1] + told[2]


def test_what_is_wrong_is_refused_by_the_name_of_its_field(demo) -> None:
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://example.com/cat.png"}]}]
    for fields, param in (
        ({"input": image}, "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
    ):
        with pytest.raises(BadRequestError) as refused:
            demo(**fields)
        assert refused.value.param.startswith(param)
