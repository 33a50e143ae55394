"""Server-sent events carry their place in the stream, and whoever has the last one goes on from there over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.gateway.http.response import LAST_EVENT_ID as HEADER
from tests.support.scripted_fleet import MODEL, Script, ScriptedFleet, scripted_fleet

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LENGTH = 10
IDS = {"include_event_ids": True}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(tmp_path, num_verifiers=2) as started:
        yield started


def body(path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": "x"}]} if path == CHAT else {"prompt": "x"}
    return {"model": MODEL, "max_tokens": LENGTH, "seed": 0, "stream": True, "stream_options": IDS, **asked, **fields}


def events_of(text: str) -> list[tuple[str | None, Any]]:
    """The id and the data of each event, those after the last JSON left out."""
    found: list[tuple[str | None, Any]] = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines())
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((lines.get("id"), json.loads(lines["data"])))
    return found


def text_of(events: list[tuple[str | None, Any]]) -> str:
    choices = [choice for _, data in events for choice in data["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


async def streamed(fleet: ScriptedFleet, path: str = COMPLETIONS, last: str = "", **fields: Any) -> httpx.Response:
    return await fleet.http.post(path, json=body(path, **fields), headers={HEADER: last} if last else {})


async def logged(fleet: ScriptedFleet, session_id: str) -> None:
    for _ in range(10_000):
        known = await fleet.store.session(session_id)
        if known is not None and known.record.committed_len == LENGTH:
            return
        await fleet.http.get("/health")
    raise AssertionError("the session was not recorded")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_goes_on_from_any_of_its_events(fleet: ScriptedFleet, path: str) -> None:
    whole = events_of((await streamed(fleet, path)).text)
    assert all(event_id for event_id, _ in whole)
    await logged(fleet, str(whole[0][0]).split(":")[0])
    for number, (event_id, data) in enumerate(whole, start=1):
        answer = await streamed(fleet, path, last=str(event_id), stream_options={"include_usage": True})
        rest = events_of(answer.text)
        assert text_of(whole[:number]) + text_of(rest) == text_of(whole)
        assert {each["id"] for _, each in rest} == {data["id"]} == {answer.headers["x-request-id"]}
        assert rest[-1][1]["usage"]["completion_tokens"] == LENGTH
        assert rest[-2][1]["choices"][0]["finish_reason"] == "length"


async def test_a_stream_that_ended_within_a_step_goes_on_from_any_of_its_events(fleet: ScriptedFleet) -> None:
    """The proof of a client is of the tokens that it got; the step had one more."""
    stops = {"stop": [fleet.letters(0, LENGTH)[3:5]], "include_stop_str_in_output": True}
    whole = events_of((await streamed(fleet, **stops)).text)
    for number, (event_id, _) in enumerate(whole, start=1):
        rest = events_of((await streamed(fleet, last=str(event_id), **stops)).text)
        assert text_of(whole[:number]) + text_of(rest) == text_of(whole) == fleet.letters(0, 5)
        assert rest[-1][1]["choices"][0]["finish_reason"] == "stop"


async def test_a_stream_whose_client_left_goes_on_where_it_stopped(fleet: ScriptedFleet) -> None:
    for verifier in fleet.verifiers:
        verifier.script = Script(pause_after=6)
    got = ""
    async with fleet.http.stream("POST", COMPLETIONS, json=body()) as answer:
        async for piece in answer.aiter_text():
            got += piece
            if len(text_of(events_of(got))) == 6:
                break
    for verifier in fleet.verifiers:
        verifier.script = Script()
    begun = events_of(got)
    rest = events_of((await streamed(fleet, last=str(begun[-1][0]))).text)
    assert text_of(begun) + text_of(rest) == fleet.letters(0, LENGTH)


async def test_whoever_has_other_tokens_is_told_so(fleet: ScriptedFleet) -> None:
    events = events_of((await streamed(fleet)).text)
    session_id, offset, digest = str(events[0][0]).split(":")
    await logged(fleet, session_id)
    answer = await streamed(fleet, last=f"{session_id}:{offset}:{digest[::-1]}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "resume_mismatch")


@pytest.mark.parametrize("last", ["x", "a:b:c", ":1:ab", "s:99999999999:ab"])
async def test_what_is_no_id_of_an_event_is_refused(fleet: ScriptedFleet, last: str) -> None:
    answer = await streamed(fleet, last=last)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, HEADER)


async def test_a_session_that_nobody_knows_is_not_found(fleet: ScriptedFleet) -> None:
    answer = await streamed(fleet, last=f"cmpl-1-0:3:{'a' * 32}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "session_not_found")


async def test_only_streams_of_one_choice_that_ask_for_it_say_where_they_are(fleet: ScriptedFleet) -> None:
    assert not any(event_id for event_id, _ in events_of((await streamed(fleet, stream_options={})).text))
    assert not any(event_id for event_id, _ in events_of((await streamed(fleet, n=2)).text))
    assert not any(event_id for event_id, _ in events_of((await streamed(fleet, logprobs=1)).text))
    answer = await streamed(fleet, last="cmpl-1-0:0:", stream=False, stream_options=None)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, HEADER)
