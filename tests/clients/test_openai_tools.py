"""Tools, reasoning and structured output of chats, with the official client."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Literal

import jsonschema
import openai
import pytest
from chats import ANSWER, CALLS, PARAMETERS, QUESTION, TOOLS
from openai import BadRequestError, OpenAI
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


def called(call: Any) -> str:
    """The name of a call, whose arguments are as the tool's schema has them."""
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
    assert call.type == "function"
    assert call.id
    return call.function.name


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


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_a_model_that_calls_nothing_answers_as_if_there_were_no_tools(demo, choice) -> None:
    plain = demo(max_tokens=20).choices[0]
    offered = demo(max_tokens=20, tools=TOOLS, tool_choice=choice).choices[0]
    assert (offered.message, offered.finish_reason) == (plain.message, plain.finish_reason)


def test_required_calls_are_as_one_of_the_tools_has_them(demo) -> None:
    for seed in range(3):
        choice = demo(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        assert called(call) in PARAMETERS


def test_the_named_tool_is_called_and_no_other(demo) -> None:
    choice = demo(tools=TOOLS, tool_choice=NAMED).choices[0]
    assert [called(each) for each in choice.message.tool_calls] == ["add"]


def test_of_tools_that_are_allowed_one_is_called_and_the_model_hears_of_no_others(demo) -> None:
    function = {"type": "function", "function": {"name": "add"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function]}}
    asked = demo(tools=TOOLS, tool_choice=allowed, parallel_tool_calls=False)
    alone = demo(
        tools=[each for each in TOOLS if each["function"]["name"] == "add"],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    assert [called(each) for each in asked.choices[0].message.tool_calls] == ["add"]
    assert asked.usage.prompt_tokens == alone.usage.prompt_tokens


def test_several_calls_may_be_required_at_once(demo) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    calls = [demo(**asked, seed=seed).choices[0].message.tool_calls for seed in range(3)]
    assert max(map(len, calls)) > 1
    # The last of each may be cut off.
    assert {called(each) for some in calls for each in some[:-1]} <= {*PARAMETERS}


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


def test_speculation_does_not_change_a_call(demo) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": "required", "temperature": 1.0}
    on, off = (demo(**asked, extra_body={"speculation": {"enabled": enabled}}) for enabled in (True, False))
    first, second = ([each.function for each in answer.choices[0].message.tool_calls or ()] for answer in (on, off))
    assert first
    assert first == second


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


def test_calls_beside_one_another_have_ids_of_their_own_and_text_before_them(agent) -> None:
    message = agent(BOTH).choices[0].message
    assert [called(each) for each in message.tool_calls] == ["get_weather", "add"]
    assert len({each.id for each in message.tool_calls}) == 2
    assert message.content.strip() == "Let me see."


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


def test_strict_tools_change_no_call_that_fits_them(agent) -> None:
    strict = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS]
    loose, enforced = (agent(BOTH, tools=tools).choices[0] for tools in (TOOLS, strict))
    assert enforced.finish_reason == loose.finish_reason == "tool_calls"
    told = [[each.function for each in choice.message.tool_calls] for choice in (loose, enforced)]
    assert told[0] == told[1]
    assert enforced.message.content == loose.message.content


def test_tokens_of_reasoning_are_counted(agent) -> None:
    usage = agent(USER).usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens


def test_reasoning_goes_back_in_under_either_name(agent) -> None:
    said = agent(USER).choices[0].message.model_dump()
    counts = [
        agent(USER, {**said, **reasoning}, USER, max_tokens=1).usage.prompt_tokens
        for reasoning in ({}, {"reasoning": None}, {"reasoning_content": None})
    ]
    none = {"reasoning": None, "reasoning_content": None}
    assert len({*counts}) == 1
    assert agent(USER, {**said, **none}, USER, max_tokens=1).usage.prompt_tokens < counts[0]


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_every_effort_is_taken(agent, effort) -> None:
    assert agent(USER, reasoning_effort=effort).choices[0].message.tool_calls


def test_a_cut_off_call_says_length(agent) -> None:
    choice = agent(USER, max_tokens=16).choices[0]
    assert choice.finish_reason == "length"


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


def test_json_mode_brings_an_object(demo) -> None:
    choice = demo(response_format={"type": "json_object"}, max_tokens=200).choices[0]
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


@pytest.mark.parametrize(
    ("structured", "holds"),
    [
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}-[0-9]{4}"}, lambda text: len(text) == 8 and text[3] == "-"),
        ({"grammar": 'start: "a" /[0-9]/ "z"'}, lambda text: text[0] + text[2:] == "az" and text[1].isdigit()),
        ({"json": Place.model_json_schema()}, lambda text: bool(Place.model_validate_json(text))),
    ],
)
def test_grammars_of_all_kinds_are_kept_to(demo, structured, holds) -> None:
    choice = demo(extra_body={"structured_outputs": structured}).choices[0]
    assert choice.finish_reason == "stop"
    assert holds(choice.message.content)


def test_a_tool_that_is_not_there_is_refused_by_the_name_of_its_field(demo) -> None:
    with pytest.raises(BadRequestError) as refused:
        demo(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "sing"}})
    assert refused.value.param == "tool_choice.function.name"
