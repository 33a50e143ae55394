"""A request that wants one call at most: its message and its generation end with the first one, at every door."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.core.errors import UnavailableError
from tests.integration.test_agent_history import CHAT, DOORS, GATEWAY, MESSAGES, RESPONSES, function, said
from tests.integration.test_tool_calls import CALLS, THOUGHT, says
from tests.support.scripted_fleet import MODEL, SHARES_A_GATEWAY, ScriptedFleet, scripted_fleet

pytestmark = SHARES_A_GATEWAY
ONE_CALL = f"{THOUGHT}So:{CALLS}"


def one_call_only(door: str) -> Any:
    """What a request says that wants one call at most."""
    if door == MESSAGES:
        return {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    return {"parallel_tool_calls": False}


def num_tokens_of_first_call(fleet: ScriptedFleet) -> int:
    """Tokens of the scripted text up to the end of its first call's arguments."""
    tokens = fleet.verifier.script.tokens or ()
    return next(n for n in range(len(tokens)) if '{"a": 1}' in fleet.codec.decode(tokens[:n]))


@pytest.mark.parametrize("at_limit", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("door", DOORS)
async def test_generation_ends_with_the_only_call_that_is_wanted(
    fleet: ScriptedFleet, door: str, stream: bool, at_limit: bool
) -> None:
    """sglang #9696, vLLM PR #26233: `parallel_tool_calls: false` let two calls through, and was charged for both."""
    says(fleet, ONE_CALL)
    num_tokens = num_tokens_of_first_call(fleet)
    # Whoever waits for more waits for ever.
    fleet.verifier.script = replace(fleet.verifier.script, pause_after=num_tokens)
    limit = "max_output_tokens" if door == RESPONSES else "max_tokens"
    conversation = {"input" if door == RESPONSES else "messages": [said(door, "user", "go")]}
    fields = {"model": MODEL, "tools": [function(door)], limit: num_tokens if at_limit else 200, **one_call_only(door)}
    if stream and door == CHAT:
        fields["stream_options"] = {"include_usage": True}
    answer = await fleet.http.post(door, json={**conversation, **fields, "stream": stream})
    assert calls_and_reason(door, answer, stream) == (['{"a": 1}'], REASONS[door])
    [told] = re.findall(r'"(?:completion|output)_tokens":\s*([1-9]\d*)', answer.text)
    assert int(told) == num_tokens
    if not at_limit:
        assert await fleet.verifier.abandoned.get() == fleet.verifier.requests[-1].session_id


REASONS = {CHAT: "tool_calls", RESPONSES: "completed", MESSAGES: "tool_use"}


def calls_and_reason(door: str, answer: httpx.Response, stream: bool) -> tuple[list[str], str]:
    """Arguments of the calls of an answer, and why it ended."""
    told = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    whole = {} if stream else answer.json()
    if door == CHAT:
        deltas = (
            [each["choices"][0] for each in told if each["choices"]]
            if stream
            else [{"delta": whole["choices"][0]["message"]}]
        )
        arguments: dict[int, str] = {}
        for at, call in [(n, call) for n, each in enumerate(deltas) for call in each["delta"].get("tool_calls", ())]:
            place = call.get("index", at)
            arguments[place] = arguments.get(place, "") + call["function"]["arguments"]
        last = deltas[-1] if stream else whole["choices"][0]
        return [*arguments.values()], last["finish_reason"]
    if door == RESPONSES:
        response = told[-1]["response"] if stream else whole
        items = [item for item in response["output"] if item["type"] == "function_call"]
        assert response["output"][-1]["type"] == "function_call"
        return [item["arguments"] for item in items], response["status"]
    if stream:
        pieces = [each["delta"]["partial_json"] for each in told if "partial_json" in each.get("delta", {})]
        begun = [each for each in told if each.get("content_block", {}).get("type") == "tool_use"]
        return ["".join(pieces)] * len(begun), told[-2]["delta"]["stop_reason"]
    blocks = [block for block in whole["content"] if block["type"] == "tool_use"]
    return [json.dumps(block["input"]) for block in blocks], whole["stop_reason"]


async def test_a_resumed_stream_has_one_call_too(fleet: ScriptedFleet) -> None:
    """sglang #9696, after the client has lost its stream within the second call, or just before it."""
    says(fleet, ONE_CALL, step_len=5)
    num_tokens = num_tokens_of_first_call(fleet)
    body = {
        "messages": [said(CHAT, "user", "go")],
        "tools": [function(CHAT)],
        **one_call_only(CHAT),
        "stream": True,
        "stream_options": {"include_event_ids": True, "include_usage": True},
    }
    whole = await fleet.http.post(CHAT, json=body)
    ids = [line.removeprefix("id: ") for line in whole.text.split("\n") if line.startswith("id: ")]
    for at in range(1, len(ids) - 1):
        rest = await fleet.http.post(CHAT, json=body, headers={"Last-Event-ID": ids[at]})
        assert '"index": 1' not in json.dumps([json.loads(x[6:]) for x in rest.text.split("\n") if x[:7] == "data: {"])
        assert '"finish_reason":"tool_calls"' in rest.text
        assert f'"completion_tokens":{num_tokens},' in rest.text


async def test_the_end_of_the_only_call_is_found_at_another_verifier_too(tmp_path: Path) -> None:
    """sglang #9696, after the verifier was lost within that call."""
    async with scripted_fleet(tmp_path, num_verifiers=2, **GATEWAY) as fleet:
        says(fleet, ONE_CALL)
        num_tokens, script = num_tokens_of_first_call(fleet), fleet.verifier.script
        fleet.verifiers[1].script = replace(script, pause_after=num_tokens)
        fleet.verifier.script = replace(script, fail_after=num_tokens - 4, error=UnavailableError("engine is dead"))
        asked = {"messages": [said(CHAT, "user", "go")], "tools": [function(CHAT)], **one_call_only(CHAT)}
        answer = await fleet.http.post(CHAT, json={"model": MODEL, **asked})
        assert calls_and_reason(CHAT, answer, stream=False) == (['{"a": 1}'], "tool_calls")
        assert answer.json()["usage"]["completion_tokens"] == num_tokens
        assert len(fleet.verifiers[1].requests) == 1
