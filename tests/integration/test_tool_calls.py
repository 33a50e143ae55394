"""Tools and reasoning through the gateway, whole and streamed, with the official client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError

from tests.support.scripted_fleet import CONTEXT_LEN, MODEL, SHARES_A_GATEWAY, Script, ScriptedFleet

pytestmark = SHARES_A_GATEWAY

USER: Any = {"role": "user", "content": "hello"}
TOOL: Any = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
THOUGHT = "<think>hm</think>"
CALLS = (
    '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
)
PARSERS = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
GATEWAY = PARSERS


def says(fleet: ScriptedFleet, text: str, step_len: int = 3) -> None:
    """From now on the verifier commits a text."""
    tokens = fleet.codec.encode(text, field="text", special_tokens=False, context_len=CONTEXT_LEN)
    fleet.verifier.script = Script(tokens=(*tokens, 0), stop_after=len(tokens), step_len=step_len)


async def asked(fleet: ScriptedFleet, **fields: Any) -> Any:
    return await fleet.openai.chat.completions.create(model=MODEL, messages=[USER], **fields)


async def test_an_answer_has_its_reasoning_and_its_calls_apart(fleet: ScriptedFleet) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}")
    answer = await asked(fleet, tools=[TOOL])
    choice = answer.choices[0]
    message = choice.message.model_dump()
    assert choice.finish_reason == "tool_calls"
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("So:", "hm", "hm")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "f", "arguments": "{}"}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("step_len", [1, 2, 7, 200])
async def test_a_stream_joins_to_the_whole_answer(fleet: ScriptedFleet, step_len: int) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}", step_len)
    stream = fleet.openai.chat.completions.stream(model=MODEL, messages=[USER], tools=[TOOL])
    async with stream as events:
        final = (await events.get_final_completion()).choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "So:"
    assert [call.function.arguments for call in final.message.tool_calls or ()] == ['{"a": 1}', "{}"]
    assert [call.function.name for call in final.message.tool_calls or ()] == ["f", "f"]
    assert [call.type for call in final.message.tool_calls or ()] == ["function", "function"]


@pytest.mark.parametrize("step_len", [1, 3, 200])
async def test_tokens_of_reasoning_are_counted_however_they_come(fleet: ScriptedFleet, step_len: int) -> None:
    says(fleet, f"{THOUGHT}So:", step_len)
    thought = fleet.codec.encode(THOUGHT, field="text", special_tokens=False, context_len=CONTEXT_LEN)
    details = (await asked(fleet)).usage.completion_tokens_details
    assert details.reasoning_tokens == len(thought)
    response = await fleet.openai.responses.create(model=MODEL, input="hello")
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == len(thought)
    says(fleet, "So:", step_len)
    assert (await asked(fleet)).usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("choice", [None, "none"])
async def test_without_tools_or_with_none_to_be_called_calls_are_content(
    fleet: ScriptedFleet, choice: str | None
) -> None:
    says(fleet, f"{THOUGHT}{CALLS}")
    fields = {} if choice is None else {"tools": [TOOL], "tool_choice": choice}
    choice_told = (await asked(fleet, **fields)).choices[0]
    assert (choice_told.finish_reason, choice_told.message.content) == ("stop", CALLS)
    assert choice_told.message.tool_calls is None


async def test_an_agent_sends_our_message_and_the_tool_s_answer_back(fleet: ScriptedFleet) -> None:
    says(fleet, f"{THOUGHT}{CALLS}")
    first = (await asked(fleet, tools=[TOOL])).choices[0].message
    said = first.model_dump()
    fleet.verifier.script = Script()
    again = await fleet.openai.chat.completions.with_raw_response.create(
        model=MODEL, messages=[USER, said, USER], tools=[TOOL], max_tokens=2
    )
    assert "x-paceline-ignored-fields" not in again.headers
    result: Any = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "1"}
    with pytest.raises(BadRequestError, match="no tools here"):
        await fleet.openai.chat.completions.create(model=MODEL, messages=[USER, said, result])


async def test_a_stream_that_broke_off_within_a_call_goes_on_within_it(fleet: ScriptedFleet) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}", step_len=5)
    body = {"messages": [USER], "tools": [TOOL], "stream": True, "stream_options": {"include_event_ids": True}}
    whole = await events(fleet, body, {})
    assert len(whole) > 5
    for at in range(1, len(whole) - 1):
        rest = await events(fleet, body, {"Last-Event-ID": whole[at][0]})
        assert arguments(whole[: at + 1]) + arguments(rest) == arguments(whole), at
        assert rest[-1][1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("step_len", [1, 4, 200])
async def test_a_stop_string_ends_what_the_user_sees_and_nothing_else(fleet: ScriptedFleet, step_len: int) -> None:
    """vLLM #53066: the stop string occurs in the thought and in the arguments of a call."""
    call = '<tool_call>{"name": "f", "arguments": {"a": "END"}}</tool_call>'
    says(fleet, f"<think>the END?</think>So:{call} it ENDs here", step_len)
    for stream in (False, True):
        fields: Any = {"tools": [TOOL], "stop": ["END"]}
        if stream:
            async with fleet.openai.chat.completions.stream(model=MODEL, messages=[USER], **fields) as events:
                answer: Any = await events.get_final_completion()
        else:
            answer = await asked(fleet, **fields)
        [choice] = answer.choices
        message = choice.message.model_dump()
        assert message["reasoning_content"] == "the END?"
        assert (message["content"], choice.finish_reason) == ("So: it ", "tool_calls")
        assert [each["function"]["arguments"] for each in message["tool_calls"]] == ['{"a": "END"}']
    says(fleet, "<think>the END?</think>So it ENDs", step_len)
    response = await fleet.openai.responses.create(model=MODEL, input="hello", extra_body={"stop": ["END"]})
    assert response.output_text == "So it "
    body = {"model": MODEL, "max_tokens": 99, "messages": [USER], "stop_sequences": ["END"]}
    told = (await fleet.http.post("/v1/messages", json=body)).json()
    assert (told["stop_reason"], told["stop_sequence"], told["content"][-1]["text"]) == (
        "stop_sequence",
        "END",
        "So it ",
    )


async def test_a_stream_that_broke_off_goes_on_to_the_same_stop_string(fleet: ScriptedFleet) -> None:
    says(fleet, "<think>the END?</think>So: it ENDs here", step_len=2)
    body = {"messages": [USER], "tools": [TOOL], "stop": ["END"], "stream": True}
    body["stream_options"] = {"include_event_ids": True}
    whole = await events(fleet, body, {})
    assert content(whole) == "So: it "
    for at in range(1, len(whole) - 1):
        rest = await events(fleet, body, {"Last-Event-ID": whole[at][0]})
        assert content(whole[: at + 1]) + content(rest) == "So: it ", at
        assert rest[-1][1]["choices"][0]["finish_reason"] == "stop"


async def test_a_call_that_begins_in_reasoning_is_a_call(fleet: ScriptedFleet) -> None:
    """vLLM PR #35687: reasoning, then a call without `</think>`."""
    says(fleet, f"<think>hm\n{CALLS}")
    choice = (await asked(fleet, tools=[TOOL])).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.model_dump()["reasoning"] == "hm"
    assert len(choice.message.tool_calls or ()) == 2


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


async def events(fleet: ScriptedFleet, body: dict[str, Any], headers: dict[str, str]) -> list[tuple[str, Any]]:
    """Events with their ids."""
    answer = await fleet.http.post("/v1/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200
    blocks = [dict(line.split(": ", 1) for line in block.split("\n")) for block in answer.text.split("\n\n") if block]
    return [(each.get("id", ""), json.loads(each["data"])) for each in blocks if each["data"] != "[DONE]"]


def content(told: list[tuple[str, Any]]) -> str:
    """The content that deltas add up to."""
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for _, chunk in told)


def arguments(told: list[tuple[str, Any]]) -> str:
    """What deltas say of calls, as text."""
    deltas = [chunk["choices"][0]["delta"] for _, chunk in told]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    return "".join(
        f"{call.get('id', '')}{call['function'].get('name', '')}{call['function']['arguments']}" for call in calls
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "perhaps"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [TOOL], "tool_choice": allowed("auto", "g")}, "tool_choice.allowed_tools.tools[0].function.name"),
        ({"tools": [TOOL], "tool_choice": allowed("never")}, "tool_choice.allowed_tools.mode"),
        ({"tools": [TOOL], "tool_choice": allowed("required")}, "tool_choice"),
    ],
)
async def test_wrong_tools_are_refused_by_name(fleet: ScriptedFleet, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        await asked(fleet, **fields)
    assert caught.value.param == param
