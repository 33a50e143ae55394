"""/v1/responses at the gateway, with the official client: whole, streamed, kept, gone on from."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest
from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient, NotFoundError

from paceline.store.base import SessionWrite, Written
from tests.integration.test_tool_calls import CALLS, PARSERS, THOUGHT, says
from tests.support.demo_gateway import demo_gateway
from tests.support.memory_store import MemoryStore
from tests.support.scripted_fleet import MODEL, SHARES_A_GATEWAY, WAIT_S, Script, ScriptedFleet, joining_doors

pytestmark = SHARES_A_GATEWAY
# No session ends here because its verifier is silent.
GATEWAY = {**PARSERS, "verifier_silence_s": 300.0}

TOOL: Any = {
    "type": "function",
    "name": "f",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False},
    "strict": False,
}
RESPONSES = "/v1/responses"


def client_of(url: str) -> AsyncOpenAI:
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http)


async def events(fleet: ScriptedFleet, url: str = "", **fields: Any) -> list[Any]:
    """The events of a stream."""
    if url:
        answer = await fleet.http.get(url)
    else:
        answer = await fleet.http.post(RESPONSES, json={"model": MODEL, "input": "hello", "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    blocks = [block.split("\n") for block in answer.text.split("\n\n") if block]
    told = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in told]
    return told


def spread(told: list[Any]) -> list[Any]:
    """Events with their deltas character by character, and without what tells runs apart."""
    out: list[Any] = []
    for event in told:
        text = event.get("delta")
        if text is None:
            out.append((event["sequence_number"], event["type"]))
        else:
            last = event["sequence_number"]
            out += [(last - len(text) + 1 + at, event["type"], each) for at, each in enumerate(text)]
    return out


async def test_a_response_has_items_of_reasoning_text_and_calls(fleet: ScriptedFleet) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}")
    response = await fleet.openai.responses.create(model=MODEL, input="hello", tools=[TOOL])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (response.status, response.output_text) == ("completed", "So:")
    told: Any = response.output
    assert told[0].content[0].text == "hm"
    assert [(call.name, call.arguments) for call in told[2:]] == [("f", '{"a": 1}'), ("f", "{}")]
    assert response.usage is not None
    assert response.usage.input_tokens == len(fleet.verifier.requests[0].prompt_token_ids)


@pytest.mark.parametrize("step_len", [1, 4, 200])
async def test_a_stream_adds_up_to_the_response(fleet: ScriptedFleet, step_len: int) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}", step_len)
    async with fleet.openai.responses.stream(model=MODEL, input="hello", tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == "So:"


async def test_events_have_the_same_numbers_however_tokens_are_grouped(fleet: ScriptedFleet) -> None:
    told = []
    for step_len in (1, 3, 200):
        says(fleet, f"{THOUGHT}So:{CALLS}", step_len)
        told.append(spread(await events(fleet, tools=[TOOL])))
    assert told[0] == told[1] == told[2]
    assert [number for number, *_ in told[0]] == list(range(len(told[0])))


async def test_a_conversation_goes_on_from_a_kept_response_at_any_gateway(fleet: ScriptedFleet) -> None:
    says(fleet, f"{THOUGHT}five")
    first = await fleet.openai.responses.create(model=MODEL, input="hello", instructions="be brief")
    async with joining_doors(fleet, **PARSERS) as addresses, client_of(f"http://{addresses.http}") as other:
        await other.responses.create(model=MODEL, input="why?", previous_response_id=first.id, max_output_tokens=3)
    turns: Any = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "five", "reasoning_content": "hm"},
        {"role": "user", "content": "why?"},
    ]
    await fleet.openai.chat.completions.create(model=MODEL, messages=turns, max_tokens=3)
    _, second, chat = fleet.verifier.requests
    assert second.prompt_token_ids == chat.prompt_token_ids


async def test_items_of_an_answer_go_back_in_as_they_came(fleet: ScriptedFleet) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}")
    first = await fleet.openai.responses.create(model=MODEL, input="hello", tools=[TOOL])
    items: Any = [{"role": "user", "content": "hello"}, *[item.model_dump() for item in first.output]]
    fleet.verifier.script = Script()
    again = await fleet.openai.responses.with_raw_response.create(model=MODEL, input=items, max_output_tokens=2)
    assert "x-paceline-ignored-fields" not in again.headers
    with pytest.raises(BadRequestError, match="no tools here"):
        result: Any = {"type": "function_call_output", "call_id": "c", "output": "1"}
        await fleet.openai.responses.create(model=MODEL, input=[*items, result])


async def test_a_response_is_shown_replayed_and_deleted(fleet: ScriptedFleet) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}")
    told = await events(fleet, tools=[TOOL])
    response = told[-1]["response"]
    path = f"{RESPONSES}/{response['id']}"
    assert (await fleet.http.get(path)).json() == response
    whole = spread(told)
    for after in range(-1, whole[-1][0] + 1):
        suffix = "" if after < 0 else f"&starting_after={after}"
        assert spread(await events(fleet, f"{path}?stream=true{suffix}")) == whole[after + 1 :]
    # The third audit: it began with the figures of its end.
    shown = [each for each in await events(fleet, f"{path}?stream=true") if "response" in each]
    assert shown == [each for each in told if "response" in each]
    assert (await fleet.http.get(f"{path}?stream=true&starting_after=x")).status_code == 400
    assert (await fleet.http.delete(path)).json() == {"id": response["id"], "object": "response", "deleted": True}
    assert (await fleet.http.get(path)).status_code == 404


async def test_a_stream_is_gone_on_with_at_another_gateway_while_it_runs(fleet: ScriptedFleet) -> None:
    says(fleet, f"{THOUGHT}So:{CALLS}")
    whole = spread(await events(fleet, tools=[TOOL]))
    script = fleet.verifier.script
    fleet.verifier.script = Script(tokens=script.tokens, stop_after=script.stop_after, pause_after=20)
    body = {"model": MODEL, "input": "hello", "stream": True, "tools": [TOOL]}
    async with fleet.http.stream("POST", RESPONSES, json=body) as running:
        lines = running.aiter_lines()
        while not (line := await anext(lines)).startswith("data: "):
            continue
        begun = json.loads(line.removeprefix("data: "))
        await fleet.verifier.paused.get()
        fleet.verifier.script = script
        path = f"{RESPONSES}/{begun['response']['id']}?stream=true"
        async with joining_doors(fleet, **PARSERS) as addresses:
            rest = await events(fleet, f"http://{addresses.http}{path}&starting_after=5")
    assert spread(rest) == whole[6:]
    assert spread(await events(fleet, path)) == whole


async def until_abandoned(fleet: ScriptedFleet, session: str) -> None:
    """Lets a paused session go on until its gateway, which learns when it writes of it that it has lost it, ends it."""
    async with asyncio.timeout(WAIT_S):
        fleet.verifier.step(session)
        assert await fleet.verifier.abandoned.get() == session


async def test_a_response_that_runs_is_cancelled(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script(pause_after=6)
    body = {"model": MODEL, "input": "hello", "stream": True}
    async with fleet.http.stream("POST", RESPONSES, json=body) as running:
        lines = running.aiter_lines()
        while not (line := await anext(lines)).startswith("data: "):
            continue
        response_id = json.loads(line.removeprefix("data: "))["response"]["id"]
        session = await fleet.verifier.paused.get()
        cancelled = await fleet.openai.responses.cancel(response_id)
        assert cancelled.status == "cancelled"
        await until_abandoned(fleet, session)
    assert (await fleet.openai.responses.retrieve(response_id)).status == "cancelled"
    with pytest.raises(BadRequestError, match="cancelled"):
        await fleet.openai.responses.create(model=MODEL, input="x", previous_response_id=response_id)


async def test_a_response_is_cancelled_before_its_session_is_recorded(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MemoryStore.write_sessions

    async def write_later(store: MemoryStore, writes: Sequence[SessionWrite]) -> list[Written]:
        await asyncio.sleep(0.2)
        return await write(store, writes)

    monkeypatch.setattr(MemoryStore, "write_sessions", write_later)
    fleet.verifier.script = Script(pause_after=6)
    async with await fleet.openai.responses.create(model=MODEL, input="hello", stream=True) as running:
        begun: Any = await anext(aiter(running))
        assert (await fleet.openai.responses.cancel(begun.response.id)).status == "cancelled"
        session = await fleet.verifier.paused.get()
        assert session == f"{begun.response.id}-0"
        await until_abandoned(fleet, session)


async def test_a_response_that_ends_after_its_cancellation_stays_cancelled(fleet: ScriptedFleet) -> None:
    # The gateway that runs it is told so when it next writes, long after.
    async with (
        joining_doors(fleet, record_interval_s=30.0) as addresses,
        client_of(f"http://{addresses.http}") as other,
    ):
        fleet.verifier.script = Script(pause_after=6)
        running = await other.responses.create(model=MODEL, input="hello", stream=True, max_output_tokens=12)
        begun: Any = await anext(aiter(running))
        session = await fleet.verifier.paused.get()
        await asyncio.sleep(0.1)
        assert (await fleet.openai.responses.cancel(begun.response.id)).status == "cancelled"
        fleet.verifier.script = Script()
        fleet.verifier.resume(session)
        kinds = [event.type async for event in running]
    assert kinds[-1] == "response.incomplete"
    assert (await fleet.openai.responses.retrieve(begun.response.id)).status == "cancelled"


async def test_what_is_not_kept_is_not_known(fleet: ScriptedFleet) -> None:
    response = await fleet.openai.responses.create(model=MODEL, input="hello", store=False, max_output_tokens=3)
    assert (response.status, response.store) == ("incomplete", False)
    with pytest.raises(NotFoundError):
        await fleet.openai.responses.retrieve(response.id)
    for name in (response.id, "resp_x", "\ud800", "x" * 1000):
        body = {"model": MODEL, "input": "x", "previous_response_id": name}
        answer = await fleet.http.post(RESPONSES, content=json.dumps(body))
        assert (answer.status_code, "previous_response_id" in answer.json()["message"]) == (404, True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "image_url"),
        ({"input": 5}, "input"),
        ({"previous_response_id": 5}, "previous_response_id"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(fleet: ScriptedFleet, fields: dict[str, Any], param: str) -> None:
    answer = await fleet.http.post(RESPONSES, json={"model": MODEL, "input": "x", **fields})
    assert answer.status_code == 400
    assert param in answer.json()["error"]["param"]


async def test_structured_text_and_required_calls_follow_their_schemas() -> None:
    schema: Any = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    async with demo_gateway() as url, client_of(url) as client:
        text: Any = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
        told = await client.responses.create(model="tiny", input="Count.", text=text, max_output_tokens=40)
        jsonschema_rs.Draft202012Validator(schema).validate(json.loads(told.output_text))
        tool: Any = {"type": "function", "name": "count", "parameters": schema, "strict": True}
        called: Any = await client.responses.create(
            model="tiny",
            input="Count.",
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
            max_output_tokens=60,
        )
        [call] = called.output
        jsonschema_rs.Draft202012Validator(schema).validate(json.loads(call.arguments))
