"""Streams that go on: at another gateway, from the log, on another verifier while one drains or comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.core.errors import (
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.messages import token_digest
from paceline.gateway.sessions.failover import SILENT_S
from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from paceline.service.status import error_from_rpc
from paceline.store.base import EPOCHS_PER_OWNER, SessionState
from tests.support.scripted_fleet import MODEL, Script, ScriptedFleet, joining_gateway, scripted_fleet

Resume = gateway_pb2.ResumeRequest


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(tmp_path, num_verifiers=2) as started:
        yield started


def request(**fields: object) -> gateway_pb2.GatewayGenerateRequest:
    sampling = common_pb2.SamplingParams(
        max_tokens=10,
        seed=0,
        logit_bias=[common_pb2.LogitBias(token_id=3, bias=1)],
        allowed_token_ids=[4, 5],
        bad_words=[common_pb2.BadWord(token_ids=[5, 6])],
    )
    return gateway_pb2.GatewayGenerateRequest(model=MODEL, prompt="x", sampling=sampling, **fields)  # type: ignore[arg-type]


def resume(fleet: ScriptedFleet, session_id: str, offset: int) -> gateway_pb2.ResumeRequest:
    """Asks for what follows the first tokens of a session."""
    digest = token_digest(fleet.letter_ids(0, offset)) if offset else ""
    return Resume(session_id=session_id, offset=offset, digest=digest)


async def rest_of(stream) -> tuple[str, int, gateway_pb2.GatewayGenerateResult]:
    responses = [response async for response in stream]
    assert not any(response.HasField("result") for response in responses[:-1])
    return "".join(r.text for r in responses), sum(len(r.token_ids) for r in responses), responses[-1].result


async def refusal(stream) -> PacelineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stream:
            pass
    return error_from_rpc(caught.value)


async def broken_off(fleet: ScriptedFleet) -> tuple[str, str, int]:
    """A stream whose client left in mid-text: its session, its text and its tokens so far."""
    for verifier in fleet.verifiers:
        verifier.script = Script(pause_after=6)
    call = fleet.stub.Generate(request())
    stream = aiter(call)
    first = await anext(stream)
    assert first.session_id
    assert not first.token_ids
    text, num_tokens = "", 0
    while num_tokens < 6:
        response = await anext(stream)
        text += response.text
        num_tokens += len(response.token_ids)
    await logged_len(fleet, first.session_id, 6)
    call.cancel()
    for verifier in fleet.verifiers:
        verifier.script = Script()
    return first.session_id, text, num_tokens


async def paused_at(fleet: ScriptedFleet) -> int:
    """Which of two verifiers pauses with the session."""
    waits = [asyncio.create_task(verifier.paused.get()) for verifier in fleet.verifiers]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    at = 0 if waits[0].done() else 1
    waits[1 - at].cancel()
    return at


async def logged_len(fleet: ScriptedFleet, session_id: str, num_tokens: int) -> None:
    """Returns when that many tokens are in the log."""
    async with asyncio.timeout(30):
        while (logged := await fleet.store.session(session_id)) is None or logged.record.committed_len < num_tokens:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_stream_that_broke_off_goes_on_with_the_very_next_token(fleet: ScriptedFleet) -> None:
    session_id, text, num_tokens = await broken_off(fleet)
    rest, num_rest, result = await rest_of(fleet.stub.Resume(resume(fleet, session_id, num_tokens)))
    assert text + rest == fleet.letters(0, 10)
    assert num_tokens + num_rest == 10
    assert (result.finish_reason, result.num_generated_tokens) == ("length", 10)
    first, *_, resumed = sorted((r for verifier in fleet.verifiers for r in verifier.requests), key=lambda r: r.epoch)
    assert resumed.epoch >= EPOCHS_PER_OWNER
    assert len(resumed.committed_token_ids) == 6
    assert resumed.sampling == first.sampling
    assert (resumed.sampling.allowed_token_ids, resumed.sampling.bad_words) == ((4, 5), ((5, 6),))


@pytest.mark.parametrize("offset", [0, 1, 5])
async def test_tokens_that_the_client_has_not_got_are_sent_from_the_log(fleet: ScriptedFleet, offset: int) -> None:
    session_id, _, _ = await broken_off(fleet)
    rest, num_rest, _ = await rest_of(fleet.stub.Resume(resume(fleet, session_id, offset)))
    assert (rest, num_rest) == (fleet.letters(0, 10)[offset:], 10 - offset)


async def test_tokens_that_the_log_lacks_are_computed_again_and_not_sent_twice(fleet: ScriptedFleet) -> None:
    session_id, _, _ = await broken_off(fleet)
    rest, num_rest, _ = await rest_of(fleet.stub.Resume(resume(fleet, session_id, 8)))
    assert (rest, num_rest) == (fleet.letters(0, 10)[8:], 2)


async def test_a_finished_session_is_sent_from_the_log_alone(fleet: ScriptedFleet) -> None:
    responses = [response async for response in fleet.stub.Generate(request())]
    session_id = responses[0].session_id
    await logged_len(fleet, session_id, 10)
    async with asyncio.timeout(30):
        while (logged := await fleet.store.session(session_id)) and logged.record.state is SessionState.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    num_requests = sum(len(verifier.requests) for verifier in fleet.verifiers)
    rest, num_rest, result = await rest_of(fleet.stub.Resume(resume(fleet, session_id, 4)))
    assert (rest, num_rest, result.finish_reason) == (fleet.letters(0, 10)[4:], 6, "length")
    assert sum(len(verifier.requests) for verifier in fleet.verifiers) == num_requests


@pytest.mark.parametrize(("include", "text_len"), [(False, 4), (True, 8)])
async def test_a_stop_string_that_begins_in_the_log_is_found_after_a_resume(
    fleet: ScriptedFleet, include: bool, text_len: int
) -> None:
    for verifier in fleet.verifiers:
        verifier.script = Script(pause_after=6)
    text = fleet.letters(0, 8)
    call = fleet.stub.Generate(request(stop=[text[4:]], include_stop_str_in_output=include))
    session_id = (await anext(aiter(call))).session_id
    await logged_len(fleet, session_id, 6)
    call.cancel()
    for verifier in fleet.verifiers:
        verifier.script = Script()
    rest, num_rest, result = await rest_of(fleet.stub.Resume(resume(fleet, session_id, 2)))
    assert (rest, num_rest, result.finish_reason) == (text[2:text_len], 6, "stop")


async def test_another_gateway_goes_on_and_the_first_one_ends_its_stream(tmp_path: Path) -> None:
    # Records are renewed after a third of their life: the first gateway learns what happened without a token.
    async with scripted_fleet(tmp_path, num_verifiers=2, record_ttl_s=1.0) as fleet:
        for verifier in fleet.verifiers:
            verifier.script = Script(pause_after=6)
        call = fleet.stub.Generate(request())
        stream = aiter(call)
        session_id = (await anext(stream)).session_id
        await logged_len(fleet, session_id, 6)
        for verifier in fleet.verifiers:
            verifier.script = Script()
        async with joining_gateway(fleet) as address, grpc.aio.insecure_channel(address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            rest, _, _ = await rest_of(stub.Resume(resume(fleet, session_id, 0)))
            assert rest == fleet.letters(0, 10)
            error = await refusal(stream)
        assert isinstance(error, StaleEpochError)
        assert "another gateway" in str(error)
        logged = await fleet.store.session(session_id)
        assert logged is not None
        assert (logged.record.state, logged.record.committed_len) == (SessionState.LENGTH, 10)


async def paused(
    fleet: ScriptedFleet, call: grpc.aio.UnaryStreamCall[Any, gateway_pb2.GatewayGenerateResponse]
) -> tuple[str, AsyncIterator[gateway_pb2.GatewayGenerateResponse]]:
    """A session that waits in its verifier, and the rest of its stream."""
    for verifier in fleet.verifiers:
        verifier.script = Script(pause_after=8)
    stream = aiter(call)
    session_id = (await anext(stream)).session_id
    await logged_len(fleet, session_id, 8)
    return session_id, stream


async def test_sessions_that_go_on_have_places_of_their_own(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, num_verifiers=2, max_sessions=1) as fleet:
        begun, text, offset = await broken_off(fleet)
        new, new_stream = await paused(fleet, fleet.stub.Generate(request()))
        assert isinstance(await refusal(fleet.stub.Generate(request())), OverloadedError)
        _, stream = await paused(fleet, fleet.stub.Resume(resume(fleet, begun, offset)))
        # Neither place is free: the session stays with its owner.
        assert isinstance(await refusal(fleet.stub.Resume(Resume(session_id=new))), OverloadedError)
        for verifier in fleet.verifiers:
            verifier.resume(begun)
            verifier.resume(new)
        assert text + (await rest_of(stream))[0] == (await rest_of(new_stream))[0] == fleet.letters(0, 10)


async def test_what_cannot_be_resumed_is_refused_by_name(fleet: ScriptedFleet) -> None:
    session_id, _, _ = await broken_off(fleet)
    assert "is not known" in str(await refusal(fleet.stub.Resume(Resume(session_id="nobody"))))
    for bad, field in [
        (Resume(session_id=""), "session_id"),
        (Resume(session_id="x" * 129), "session_id"),
        (resume(fleet, session_id, 11), "offset"),
        (Resume(session_id=session_id, offset=3), "digest"),
    ]:
        error = await refusal(fleet.stub.Resume(bad))
        assert isinstance(error, InvalidRequestError)
        assert error.field == field
    rest, _, _ = await rest_of(fleet.stub.Resume(resume(fleet, session_id, 6)))
    assert rest == fleet.letters(0, 10)[6:]


async def test_sessions_leave_a_draining_verifier_in_mid_stream(fleet: ScriptedFleet) -> None:
    for verifier in fleet.verifiers:
        verifier.script = Script(pause_after=6)
    asking = asyncio.create_task(rest_of(fleet.stub.Generate(request())))
    at = await paused_at(fleet)
    fleet.verifiers[1 - at].script = Script()
    await fleet.store.drain(f"verifier-{at}")
    text, num_tokens, _ = await asking
    assert (text, num_tokens) == (fleet.letters(0, 10), 10)
    [moved] = fleet.verifiers[1 - at].requests
    assert (moved.epoch, len(moved.committed_token_ids)) == (2, 6)


async def test_sessions_leave_a_silent_verifier_that_is_no_longer_in_the_registry(fleet: ScriptedFleet) -> None:
    for verifier in fleet.verifiers:
        verifier.script = Script(pause_after=6)
    asking = asyncio.create_task(rest_of(fleet.stub.Generate(request())))
    at = await paused_at(fleet)
    fleet.verifiers[1 - at].script = Script()
    await fleet.store.withdraw(f"verifier-{at}")
    assert (await asking)[0] == fleet.letters(0, 10)
    assert len(fleet.verifiers[1 - at].requests) == 1


async def test_the_only_verifier_keeps_its_sessions_while_it_drains(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path) as fleet:
        fleet.verifier.script = Script(pause_after=6)
        asking = asyncio.create_task(rest_of(fleet.stub.Generate(request())))
        session_id = await fleet.verifier.paused.get()
        await fleet.store.drain("verifier-0")
        while (await fleet.http.get("/health")).json()["verifiers"]:
            continue
        fleet.verifier.resume(session_id)
        assert (await asking)[0] == fleet.letters(0, 10)
        assert len(fleet.verifier.requests) == 1


async def test_a_clock_that_jumps_in_the_store_ends_no_session_and_the_next_heartbeat_mends_it(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, num_verifiers=2) as fleet:
        for verifier in fleet.verifiers:
            verifier.script = Script(pause_after=6)
        replicas = await fleet.store.replicas()
        asking = asyncio.create_task(rest_of(fleet.stub.Generate(request())))
        at = await paused_at(fleet)
        fleet.store._clock = lambda: time.monotonic() + 1e6
        while (await fleet.http.get("/health")).status_code == 200:
            continue
        # Longer than a verifier may be silent that has left the registry while others are in it.
        await asyncio.sleep(1.5 * SILENT_S)
        fleet.verifiers[at].resume(fleet.verifiers[at].requests[0].session_id)
        assert (await asking)[0] == fleet.letters(0, 10)
        assert sum(len(verifier.requests) for verifier in fleet.verifiers) == 1
        await fleet.announce(*replicas)
        while (await fleet.http.get("/health")).status_code != 200:
            continue
        for verifier in fleet.verifiers:
            verifier.script = Script()
        assert (await rest_of(fleet.stub.Generate(request())))[0] == fleet.letters(0, 10)


async def test_a_session_waits_for_its_verifier_to_come_back(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, failover_s=30.0) as fleet:
        fleet.verifier.script = Script(fail_after=6, error=UnavailableError("restarting"))
        asking = asyncio.create_task(rest_of(fleet.stub.Generate(request())))
        while len(fleet.verifier.requests) < 3:  # noqa: ASYNC110 - the script tells nobody
            await asyncio.sleep(0.01)
        fleet.verifier.script = Script()
        text, num_tokens, _ = await asking
        assert (text, num_tokens) == (fleet.letters(0, 10), 10)
        epochs = [each.epoch for each in fleet.verifier.requests]
        assert epochs == sorted(set(epochs))


async def test_a_draining_gateway_says_so_and_serves_again_when_the_mark_is_gone(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path, replica_id="g1") as fleet:
        await fleet.store.drain("g1")
        while (health := await fleet.http.get("/health")).status_code == 200:
            continue
        assert health.json()["status"] == "draining"
        assert isinstance(await refusal(fleet.stub.Generate(request())), UnavailableError)
        await fleet.store.drain("g1", draining=False)
        while (await fleet.http.get("/health")).status_code != 200:
            continue
        assert (await rest_of(fleet.stub.Generate(request())))[0] == fleet.letters(0, 10)
