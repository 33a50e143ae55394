"""What becomes of kept responses, whoever leaves or fails, and of everybody else while one keeps much."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.gateway.api.responses import kept as keeping
from paceline.gateway.api.responses.kept import KeptResponse
from paceline.gateway.http.response import to_json
from paceline.gateway.sessions import records, take_over
from tests.support.memory_store import MemoryStore
from tests.support.scripted_fleet import (
    MODEL,
    SHARES_A_GATEWAY,
    WAIT_S,
    Script,
    ScriptedFleet,
    joining_doors,
)

pytestmark = SHARES_A_GATEWAY

RESPONSES = "/v1/responses"
BODY: dict[str, Any] = {"model": MODEL, "input": "hello", "max_output_tokens": 12}
INTERRUPTED = {"reason": "interrupted"}


async def shown(http: httpx.AsyncClient, response_id: str) -> Any:
    return (await http.get(f"{RESPONSES}/{response_id}")).json()


async def shown_as(http: httpx.AsyncClient, response_id: str, status: str) -> Any:
    """The response, once it has a status."""
    async with asyncio.timeout(WAIT_S):
        while (found := await shown(http, response_id)).get("status") != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


@asynccontextmanager
async def paused_stream(fleet: ScriptedFleet, http: httpx.AsyncClient) -> AsyncIterator[tuple[str, str]]:
    """A stream of which six tokens have come: ids of its response and of its session."""
    fleet.verifier.script = Script(pause_after=6)
    async with http.stream("POST", RESPONSES, json={**BODY, "stream": True}) as running:
        # Whoever lets go of the lines lets go of the stream.
        lines = running.aiter_lines()
        while not (line := await anext(lines)).startswith("data: "):
            continue
        event = json.loads(line.removeprefix("data: "))
        yield event["response"]["id"], await fleet.verifier.paused.get()


def documents_of(fleet: ScriptedFleet) -> dict[Any, Any]:
    return fleet.store._documents


# The end of a response.


async def test_a_response_whose_client_left_is_incomplete_and_can_be_streamed_to_its_end(fleet: ScriptedFleet) -> None:
    """The second audit: it stayed `in_progress` for a day, so whoever polled never ended."""
    async with paused_stream(fleet, fleet.http) as (response_id, session_id):
        assert (await shown(fleet.http, response_id))["status"] == "in_progress"
    assert await fleet.verifier.abandoned.get() == session_id
    left = await shown_as(fleet.http, response_id, "incomplete")
    assert left["incomplete_details"] == INTERRUPTED
    again = await fleet.http.post(RESPONSES, json={**BODY, "previous_response_id": response_id})
    assert (again.status_code, again.json()["param"]) == (400, "previous_response_id")
    fleet.verifier.script = Script()
    rest = await fleet.http.get(f"{RESPONSES}/{response_id}?stream=true")
    last = json.loads(rest.text.rstrip().rsplit("data: ", 1)[1])
    # By its tokens, which were fewer than it wanted.
    assert (last["type"], last["response"]["incomplete_details"]) == (
        "response.incomplete",
        {"reason": "max_output_tokens"},
    )
    assert await shown(fleet.http, response_id) == last["response"]
    assert (await fleet.http.post(RESPONSES, json={**BODY, "previous_response_id": response_id})).status_code == 200


async def test_a_broken_off_response_goes_on_at_a_gateway_that_is_busy(fleet: ScriptedFleet) -> None:
    async with (
        joining_doors(fleet, max_sessions=1) as addresses,
        httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=WAIT_S, trust_env=False, verify=False) as busy,
    ):
        async with paused_stream(fleet, fleet.http) as (response_id, session_id):
            pass
        assert await fleet.verifier.abandoned.get() == session_id
        await shown_as(fleet.http, response_id, "incomplete")
        async with paused_stream(fleet, busy) as (_, running):
            assert (await busy.post(RESPONSES, json=BODY)).status_code == 429
            fleet.verifier.script = Script()
            rest = await busy.get(f"{RESPONSES}/{response_id}?stream=true")
            assert rest.status_code == 200
            assert json.loads(rest.text.rstrip().rsplit("data: ", 1)[1])["type"] == "response.incomplete"
            fleet.verifier.resume(running)


async def test_a_head_of_a_stream_leaves_its_session_alone(fleet: ScriptedFleet) -> None:
    async with paused_stream(fleet, fleet.http) as (response_id, session_id):
        head = await fleet.http.head(f"{RESPONSES}/{response_id}?stream=true")
        assert (head.status_code, head.headers["content-type"]) == (200, "application/json")
        fleet.verifier.resume(session_id)
        await shown_as(fleet.http, response_id, "incomplete")
        assert len(fleet.verifier.requests) == 1


async def test_a_response_that_the_verifier_fails_is_failed(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script(fail_after=6, error=InvalidRequestError("seed", "is not liked"))
    answer = await fleet.http.post(RESPONSES, json={**BODY, "stream": True})
    response_id = json.loads(answer.text.split("data: ")[1].split("\n")[0])["response"]["id"]
    failed = await shown_as(fleet.http, response_id, "failed")
    assert failed["error"] == {"code": "server_error", "message": "seed: is not liked"}
    assert [item["status"] for item in failed["output"]] == ["incomplete"]


async def test_what_is_refused_is_not_kept(fleet: ScriptedFleet) -> None:
    """The second audit: a refused request stayed as `in_progress`, with all its bytes."""
    before = set(documents_of(fleet))
    fleet.verifier.script = Script(fail_after=0, error=InvalidRequestError("seed", "is not liked"))
    assert (await fleet.http.post(RESPONSES, json=BODY)).status_code == 400
    fleet.verifier.script = Script()
    kept = (await fleet.http.post(RESPONSES, json=BODY)).json()["id"]
    assert set(documents_of(fleet)) - before == {("", kept)}


async def test_a_response_of_a_gateway_that_died_is_incomplete_to_its_readers(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "RENEWAL_S", 0.05)
    monkeypatch.setattr(take_over, "RUNNING_S", 0.5)
    async with (
        joining_doors(fleet) as addresses,
        httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=WAIT_S, trust_env=False, verify=False) as other,
        paused_stream(fleet, other) as (response_id, session_id),
    ):
        await shown_as(fleet.http, response_id, "in_progress")
        # Its record is written again and again.
        await asyncio.sleep(0.8)
        assert (await shown(fleet.http, response_id))["status"] == "in_progress"
        # As of a gateway that is gone.
        monkeypatch.setattr(MemoryStore, "write_sessions", gone)
        assert (await shown_as(fleet.http, response_id, "incomplete"))["incomplete_details"] == INTERRUPTED
        fleet.verifier.resume(session_id)


async def gone(*_: object, **__: object) -> None:
    raise UnavailableError("the gateway is gone")


async def test_a_client_that_left_late_does_not_undo_what_went_on_elsewhere(fleet: ScriptedFleet) -> None:
    async with (
        joining_doors(fleet, record_interval_s=30.0) as addresses,
        httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=WAIT_S, trust_env=False, verify=False) as other,
    ):
        async with paused_stream(fleet, other) as (response_id, _):
            await asyncio.sleep(0.1)
            fleet.verifier.script = Script()
            await fleet.http.get(f"{RESPONSES}/{response_id}?stream=true")
            ended = await shown(fleet.http, response_id)
        # Its first gateway learns only now that nobody reads there any more.
        await fleet.verifier.abandoned.get()
        await asyncio.sleep(0.1)
        assert await shown(fleet.http, response_id) == ended
        assert ended["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_client_that_leaves_after_its_cancellation_does_not_undo_it(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        # So long that the session is not given up before its client leaves.
        joining_doors(fleet, record_interval_s=30.0) as addresses,
        httpx.AsyncClient(base_url=f"http://{addresses.http}", timeout=WAIT_S, trust_env=False, verify=False) as other,
    ):
        async with paused_stream(fleet, other) as (response_id, _):
            await asyncio.sleep(0.1)
            assert (await other.post(f"{RESPONSES}/{response_id}/cancel")).json()["status"] == "cancelled"
            monkeypatch.setattr(MemoryStore, "keep", gone)
        await fleet.verifier.abandoned.get()
        await asyncio.sleep(0.05)
        assert (await shown(other, response_id))["status"] == "cancelled"


async def test_a_deleted_response_does_not_come_back_with_its_end(fleet: ScriptedFleet) -> None:
    async with paused_stream(fleet, fleet.http) as (response_id, session_id):
        await shown_as(fleet.http, response_id, "in_progress")
        assert (await fleet.http.delete(f"{RESPONSES}/{response_id}")).status_code == 200
        fleet.verifier.resume(session_id)
    await asyncio.sleep(0.05)
    assert (await fleet.http.get(f"{RESPONSES}/{response_id}")).status_code == 404


# A store that hangs.


async def test_a_store_that_hangs_is_not_on_the_way_of_tokens(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second audit: the first delta came after 2 s and the end after 4 s, for each response."""

    answers = asyncio.Event()

    async def hang(*_: object, **__: object) -> None:
        await answers.wait()
        raise UnavailableError("the store does not answer in time")

    monkeypatch.setattr(keeping, "REST_S", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "keep", hang)
        async with asyncio.timeout(WAIT_S):
            for _ in range(4):
                response = (await fleet.http.post(RESPONSES, json=BODY)).json()
                # Nobody else has it, yet this gateway knows it.
                assert (await shown(fleet.http, response["id"])) == response
        answers.set()
    # It is written once the store is back.
    async with joining_doors(fleet) as addresses, asyncio.timeout(WAIT_S):
        url = f"http://{addresses.http}{RESPONSES}/{response['id']}"
        while (await fleet.http.get(url)).status_code == 404:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert (await fleet.http.get(url)).json() == response


# Bounds.


@pytest.mark.parametrize(
    "metadata",
    [{f"k{at}": "v" for at in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}],
    ids=["members", "key", "value"],
)
async def test_metadata_have_openais_bounds(fleet: ScriptedFleet, metadata: dict[str, str]) -> None:
    answer = await fleet.http.post(RESPONSES, json={**BODY, "metadata": metadata})
    assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, "metadata")
    most = {"metadata": {f"{at:064}": "v" * 512 for at in range(16)}}
    assert (await fleet.http.post(RESPONSES, json={**BODY, **most})).json()["metadata"] == most["metadata"]


async def test_a_request_too_long_to_be_kept_is_refused_by_name_or_answered_unkept(fleet: ScriptedFleet) -> None:
    async with joining_doors(fleet, response_room_bytes=1 << 20) as addresses:
        url = f"http://{addresses.http}{RESPONSES}"
        shape = {"type": "json_schema", "name": "n", "schema": {"type": "string", "description": "x" * (1 << 16)}}
        body = {**BODY, "text": {"format": shape}}
        answer = await fleet.http.post(url, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "store")
        assert "at most 65536 are kept" in answer.json()["message"]
        assert (await fleet.http.post(url, json={**body, "store": False})).status_code == 200


async def test_texts_beyond_ascii_do_not_grow_in_answers_or_in_the_store(fleet: ScriptedFleet) -> None:
    """The second audit: two million characters made an answer of 35 MiB of a body of 3.9 MiB."""
    text = "é" * 400 + "\u2028\x85"
    body = {**BODY, "metadata": {"k": text}, "stream": True}
    raw = json.dumps(body, ensure_ascii=False).encode()
    answer = await fleet.http.post(RESPONSES, content=raw)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert [event["response"]["metadata"]["k"] for event in (*events[:2], events[-1])] == [text] * 3
    assert len(answer.content) < 3 * len(raw) + 6000
    stored = documents_of(fleet)["", events[0]["response"]["id"]].document.body
    assert stored.count("é".encode()) == 400
    assert to_json({"broken": "\ud800"}) == b'{"broken":"\\ud800"}'


async def test_a_long_response_is_not_read_on_the_event_loop(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    read = KeptResponse.from_document

    def reading(document: Any) -> KeptResponse:
        threads.append(threading.current_thread().name)
        return read(document)

    monkeypatch.setattr(KeptResponse, "from_document", reading)
    for metadata in ({}, {f"{at}": "v" * 512 for at in range(16)}):
        response = (await fleet.http.post(RESPONSES, json={**BODY, "metadata": metadata})).json()
        assert await shown(fleet.http, response["id"]) == response
    assert threads[0] == threading.main_thread().name != threads[1]
