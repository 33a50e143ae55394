"""What HTTP clients see when requests are bad, verifiers fail, clients leave, or the gateway stops."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paceline.core.errors import InvalidRequestError, OverloadedError, UnavailableError
from paceline.gateway.fleet import verifier_health
from paceline.gateway.http import connection, response
from paceline.gateway.http.connection import MAX_FRAMING_BYTES
from paceline.store.base import Replica
from tests.support.scripted_fleet import MODEL, SHARES_A_GATEWAY, Script, ScriptedFleet, identity, scripted_fleet

pytestmark = SHARES_A_GATEWAY

REQUEST: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 10, "seed": 0}
COMPLETIONS = "/v1/completions"
PAUSED = Script(pause_after=6)


@asynccontextmanager
async def connected(fleet: ScriptedFleet) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to the gateway's HTTP door while a block runs, which ends by itself, however slow the machine is."""
    host, port = fleet.addresses.http.split(":")
    with socket.socket() as client:
        # The kernel would keep some megabytes for one that does not read.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=client.dup())
    async with asyncio.timeout(60):
        try:
            yield reader, writer
        finally:
            writer.close()


async def post(fleet: ScriptedFleet, **fields: Any) -> httpx.Response:
    return await fleet.http.post(COMPLETIONS, json={**REQUEST, **fields})


async def assert_next_request_works(fleet: ScriptedFleet) -> None:
    fleet.verifier.script = Script()
    answer = await post(fleet)
    assert answer.json()["choices"][0]["text"] == fleet.letters(0, 10)


def events_of(answer: httpx.Response) -> list[Any]:
    """Returns the JSON events of a stream, which must have been closed in order."""
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_an_unknown_model_is_not_found_and_those_served_are_named(fleet: ScriptedFleet) -> None:
    with pytest.raises(openai.NotFoundError, match="served: tiny") as caught:
        await fleet.openai.completions.create(model="gpt-9", prompt="x")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
    error_of(await fleet.http.get("/v1/models/gpt-9"), 404)
    await assert_next_request_works(fleet)


async def test_a_body_of_10_mb_is_refused_with_the_limit(fleet: ScriptedFleet) -> None:
    body = json.dumps({**REQUEST, "prompt": "x" * 10_000_000}).encode()
    error = error_of(await fleet.http.post(COMPLETIONS, content=body), 413)
    assert "4194304 bytes" in error["message"]
    await assert_next_request_works(fleet)


async def test_a_body_of_10_mb_without_a_length_is_refused_too(fleet: ScriptedFleet) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 1_000_000

    error_of(await fleet.http.post(COMPLETIONS, content=pieces()), 413)
    await assert_next_request_works(fleet)


async def test_a_body_that_does_not_arrive_is_given_up(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, body_timeout_s=0.1) as fleet:
        host, port = fleet.addresses.http.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
        assert b" 408 " in await reader.readline()
        writer.close()
        await assert_next_request_works(fleet)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (HEAD + b"X-Long: ", b"a"),
        (HEAD, b"X-Many: a\r\n"),
        (b"GET /", b"a"),
        (CHUNKED + b"5;extension=", b"a"),
        (CHUNKED + b"0\r\n", b"X-Trailer: a\r\n"),
    ],
    ids=["header", "headers", "path", "chunk-extension", "trailers"],
)
async def test_a_request_whose_framing_has_no_end_is_refused(fleet: ScriptedFleet, begin: bytes, more: bytes) -> None:
    async with connected(fleet) as (reader, writer):
        # Not a byte more, which would be unread when the gateway closes, and reset the connection.
        writer.write((begin + more * MAX_FRAMING_BYTES)[: MAX_FRAMING_BYTES + 1])
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert f"limit of {MAX_FRAMING_BYTES} bytes".encode() in answer
    await assert_next_request_works(fleet)


async def test_a_long_body_earns_no_trailers_without_end(fleet: ScriptedFleet) -> None:
    body = json.dumps(REQUEST).encode() + b" " * 20 * MAX_FRAMING_BYTES
    async with connected(fleet) as (reader, writer):
        writer.write(CHUNKED + b"%x\r\n%s\r\n0\r\n" % (len(body), body))
        answer = asyncio.create_task(reader.readline())
        trailers, num_sent = b"X-Trailer: a\r\n" * 100, 0
        while not answer.done():
            num_sent += len(trailers)
            writer.write(trailers)
            await asyncio.sleep(0.001)
        assert b" 431 " in answer.result()
        # The limit, as much that the body earns, and what is under way.
        assert num_sent < 8 * MAX_FRAMING_BYTES


async def test_a_body_in_chunks_of_one_byte_is_as_good_as_any(fleet: ScriptedFleet) -> None:
    body = json.dumps(REQUEST) + " " * MAX_FRAMING_BYTES
    async with connected(fleet) as (reader, writer):
        writer.write(CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body.encode()) + b"0\r\n\r\n")
        assert b" 200 " in await reader.readline()


@pytest.mark.parametrize("begin", [b"", HEAD])
async def test_a_head_that_does_not_come_is_waited_for_in_vain_only_so_long(
    fresh_fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch, begin: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    async with connected(fresh_fleet) as (reader, writer):
        writer.write(begin)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 0.2 s" in answer


async def test_a_head_is_waited_for_anew_with_each_request_of_a_connection(
    fresh_fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    async with connected(fresh_fleet) as (reader, writer):
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" + HEAD)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer


async def test_a_late_head_breaks_off_no_answer_before_it(
    fresh_fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.05)
    fresh_fleet.verifier.script = PAUSED
    body = json.dumps({**REQUEST, "stream": True}).encode()
    async with connected(fresh_fleet) as (reader, writer):
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body) + HEAD)
        session_id = await fresh_fleet.verifier.paused.get()
        await asyncio.sleep(0.2)
        fresh_fleet.verifier.resume(session_id)
        answer = await reader.read()
    assert answer.index(b"data: [DONE]") < answer.index(b"HTTP/1.1 408 ")


async def test_unknown_paths_and_methods_have_an_error_object(fleet: ScriptedFleet) -> None:
    assert "GET /v2" in error_of(await fleet.http.get("/v2"), 404)["message"]
    error_of(await fleet.http.get(COMPLETIONS), 405)


async def test_requests_beyond_the_bound_are_told_when_to_come_again(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, max_sessions=2) as fleet:
        fleet.verifier.script = PAUSED
        first = asyncio.create_task(post(fleet, n=2))
        paused = [await fleet.verifier.paused.get() for _ in range(2)]
        refused = await post(fleet)
        assert "2 of 2 sessions are taken" in error_of(refused, 429)["message"]
        assert int(refused.headers["retry-after"]) >= 1
        for session_id in paused:
            fleet.verifier.resume(session_id)
        assert (await first).status_code == 200
        await assert_next_request_works(fleet)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OverloadedError("queue is full", retry_after_s=7.0), 429),
        (UnavailableError("engine is dead"), 503),
        (InvalidRequestError("max_tokens", "too many for this verifier"), 400),
        (ZeroDivisionError(), 500),
    ],
)
async def test_a_verifier_that_refuses_at_once_gives_the_request_its_status(
    fresh_fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, stream: bool
) -> None:
    # The verifier is asked again at once.
    monkeypatch.setattr(verifier_health, "FULL_S", 0.0)
    fresh_fleet.verifier.script = Script(fail_after=0, error=error)
    answer = await post(fresh_fleet, stream=stream)
    described = error_of(answer, status)
    if status == 429:
        assert answer.headers["retry-after"] == "7"
    if status == 400:
        assert described["param"] == "max_tokens"
    await assert_next_request_works(fresh_fleet)


async def test_the_word_of_a_verifier_that_is_full_holds_for_a_moment(
    fresh_fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifier_health, "FULL_S", 60.0)
    fresh_fleet.verifier.script = Script(fail_after=0, error=OverloadedError("queue is full", retry_after_s=60.0))
    for _ in range(3):
        error_of(await post(fresh_fleet), 429)
    assert len(fresh_fleet.verifier.requests) == 1


async def test_a_verifier_that_fails_in_mid_stream_ends_the_stream_with_an_error_event(
    fresh_fleet: ScriptedFleet,
) -> None:
    fresh_fleet.verifier.script = Script(fail_after=6, error=UnavailableError("engine is dead"))
    answer = await post(fresh_fleet, stream=True)
    assert answer.status_code == 200
    *chunks, last = events_of(answer)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == fresh_fleet.letters(0, 6)
    assert last["error"]["code"] == "unavailable"
    assert "engine is dead" in last["error"]["message"]
    await assert_next_request_works(fresh_fleet)


async def test_one_failing_sample_ends_the_others_too(fresh_fleet: ScriptedFleet) -> None:
    fresh_fleet.verifier.script = Script(pause_after=3, fail_after=6, error=UnavailableError("engine is dead"))
    asking = asyncio.create_task(post(fresh_fleet, stream=True, n=3))
    paused = [await fresh_fleet.verifier.paused.get() for _ in range(3)]
    fresh_fleet.verifier.resume(paused[1])
    assert "error" in events_of(await asking)[-1]
    assert {await fresh_fleet.verifier.abandoned.get() for _ in range(3)} == {
        request.session_id for request in fresh_fleet.verifier.requests
    }
    await assert_next_request_works(fresh_fleet)


async def test_a_session_whose_verifier_dies_goes_on_with_the_very_next_token_on_another(
    tmp_path: Path,
) -> None:
    async with scripted_fleet(tmp_path, num_verifiers=2) as fleet:
        fleet.verifier.script = Script(fail_after=6, error=UnavailableError("engine is dead"))
        answer = await post(fleet, stream=True)
        texts = [choice["text"] for event in events_of(answer) for choice in event["choices"]]
        assert "".join(texts) == fleet.letters(0, 10)
        [second] = fleet.verifiers[1].requests
        assert (second.epoch, len(second.committed_token_ids)) == (2, 6)
        assert second.sampling == fleet.verifier.requests[0].sampling


async def test_a_dead_address_in_the_registry_costs_a_retry_and_no_error(fresh_fleet: ScriptedFleet) -> None:
    await fresh_fleet.announce(
        Replica(
            replica_id="a-dead-one",
            role="verifier",
            address="127.0.0.1:1",
            identity=identity(fresh_fleet.codec),
            max_sessions=8,
        )
    )
    while (await fresh_fleet.http.get("/health")).json()["verifiers"] < 2:
        continue
    await assert_next_request_works(fresh_fleet)


async def test_a_silent_verifier_is_given_up_and_its_call_cancelled(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, verifier_silence_s=2.0) as fleet:
        fleet.verifier.script = PAUSED
        last = events_of(await post(fleet, stream=True))[-1]
        assert "was silent for 2 s" in last["error"]["message"]
        assert await fleet.verifier.abandoned.get() == fleet.verifier.requests[0].session_id
        await assert_next_request_works(fleet)


async def test_a_session_whose_client_does_not_read_ends_and_goes_to_no_other_verifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(response, "CLIENT_BYTES", 1024 * 1024)
    async with scripted_fleet(tmp_path, num_verifiers=2, context_len=32_768) as fleet:
        for each in fleet.verifiers:
            # A fast verifier would end the session before a slow gateway has seen that its client is stuck.
            each.script = Script(step_len=64, pause_after=29_000)
        # Some 25 MB of events, more than any kernel keeps for a client.
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}
        raw = json.dumps({**chat, "max_tokens": 30_000, "stream": True}).encode()
        async with connected(fleet) as (reader, writer):
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n"
            writer.write(head.encode() + raw)
            await reader.readuntil(b"data: ")
            [used] = [each for each in fleet.verifiers if each.requests]
            assert [await used.abandoned.get()] == [request.session_id for request in used.requests]
        await assert_next_request_works(fleet)


async def test_a_client_that_leaves_a_stream_cancels_the_verifiers_call(fresh_fleet: ScriptedFleet) -> None:
    fresh_fleet.verifier.script = PAUSED
    stream = await fresh_fleet.openai.completions.create(model=MODEL, prompt="x", max_tokens=99, stream=True)
    async for _ in stream:
        break
    await stream.close()
    assert await fresh_fleet.verifier.abandoned.get() == fresh_fleet.verifier.requests[0].session_id
    await assert_next_request_works(fresh_fleet)


async def test_a_client_that_leaves_before_its_answer_cancels_the_verifiers_calls(
    fresh_fleet: ScriptedFleet,
) -> None:
    fresh_fleet.verifier.script = PAUSED
    asking = asyncio.create_task(post(fresh_fleet, n=2))
    for _ in range(2):
        await fresh_fleet.verifier.paused.get()
    asking.cancel()
    assert {await fresh_fleet.verifier.abandoned.get() for _ in range(2)} == {
        request.session_id for request in fresh_fleet.verifier.requests
    }
    await assert_next_request_works(fresh_fleet)


async def test_a_fleet_without_a_verifier_is_unwell_and_says_so(fresh_fleet: ScriptedFleet) -> None:
    await fresh_fleet.store.withdraw("verifier-0")
    while (health := await fresh_fleet.http.get("/health")).status_code == 200:
        continue
    assert health.json()["status"] == "no verifier"
    answer = await post(fresh_fleet)
    assert "no verifier of model 'tiny'" in error_of(answer, 503)["message"]
    assert "retry-after" in answer.headers


async def test_a_stopping_gateway_finishes_its_streams_and_refuses_new_ones(fresh_fleet: ScriptedFleet) -> None:
    fresh_fleet.verifier.script = PAUSED
    running = asyncio.create_task(post(fresh_fleet, stream=True))
    session_id = await fresh_fleet.verifier.paused.get()
    fresh_fleet.stop.set()
    while (health := await fresh_fleet.http.get("/health")).status_code == 200:
        continue
    assert health.json()["status"] == "draining"
    assert "shutting down" in error_of(await post(fresh_fleet), 503)["message"]
    fresh_fleet.verifier.resume(session_id)
    chunks = events_of(await running)
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == fresh_fleet.letters(0, 10)
    await fresh_fleet.gateway


async def test_at_the_deadline_a_stopping_gateway_ends_streams_with_an_error_event(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, grace_s=0.0) as fleet:
        fleet.verifier.script = PAUSED
        async with fleet.http.stream("POST", COMPLETIONS, json={**REQUEST, "stream": True}) as answer:
            # Its head was sent: an error has to come as an event.
            await fleet.verifier.paused.get()
            fleet.stop.set()
            await answer.aread()
        last = events_of(answer)[-1]
        assert last["error"]["message"] == "the gateway is shutting down"
        await fleet.gateway
