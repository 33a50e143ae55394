"""A client over HTTP that knows several gateways gets each character once, whatever happens to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from loadtest.resuming_http import RefusedError, ResumingHttpClient

from paceline.core.errors import EngineDiedError, OverloadedError, UnavailableError
from paceline.rpc.v1 import common_pb2, gateway_pb2
from tests.support.scripted_fleet import MODEL, Script, ScriptedFleet, joining_doors, scripted_fleet

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(tmp_path, num_verifiers=2, grace_s=0.0) as started:
        yield started


def url(address: str) -> str:
    return f"http://{address}"


def all_follow(fleet: ScriptedFleet, script: Script) -> None:
    for verifier in fleet.verifiers:
        verifier.script = script


async def text_of(client: ResumingHttpClient, max_tokens: int = 10) -> str:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, seed=0)
    request = gateway_pb2.GatewayGenerateRequest(model=MODEL, prompt="x", sampling=sampling)
    pieces = [piece async for piece in client.stream(request)]
    assert [piece.HasField("result") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return "".join(piece.text for piece in pieces)


async def paused(fleet: ScriptedFleet) -> str:
    """The session that one of the verifiers pauses with."""
    waits = [asyncio.create_task(verifier.paused.get()) for verifier in fleet.verifiers]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    [session_id] = [wait.result() for wait in waits if wait.done()]
    for wait in waits:
        wait.cancel()
    return session_id


async def test_a_gateway_that_is_not_there_is_passed_over(fleet: ScriptedFleet) -> None:
    async with ResumingHttpClient([NOWHERE, url(fleet.addresses.http)]) as client:
        for _ in range(2):
            assert await text_of(client) == fleet.letters(0, 10)


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_stream_outlives_its_gateway_with_or_without_a_record(
    fleet: ScriptedFleet, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(session_id: str) -> None:
        del session_id

    all_follow(fleet, Script(pause_after=6))
    async with (
        joining_doors(fleet) as other,
        ResumingHttpClient([url(fleet.addresses.http), url(other.http)]) as client,
    ):
        asking = asyncio.create_task(text_of(client))
        session_id = await paused(fleet)
        all_follow(fleet, Script())
        if recorded:
            async with asyncio.timeout(30):
                while (logged := await fleet.store.session(session_id)) is None or logged.record.committed_len < 6:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        else:
            monkeypatch.setattr(fleet.store, "session", unknown)
        fleet.stop.set()
        await fleet.gateway
        assert await asking == fleet.letters(0, 10)
        assert client.num_resumed
    resumed = [len(each.committed_token_ids) for verifier in fleet.verifiers for each in verifier.requests]
    assert sorted(resumed) == ([0, 6] if recorded else [0, 0])


async def test_a_new_beginning_that_breaks_off_before_it_got_as_far_is_resumed_without_a_character_twice(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = fleet.store.session

    async def unknown(session_id: str) -> None:
        del session_id

    async with AsyncExitStack() as last, AsyncExitStack() as third:
        urls = [
            url(fleet.addresses.http),
            url((await last.enter_async_context(joining_doors(fleet))).http),
            url((await third.enter_async_context(joining_doors(fleet, grace_s=0.0))).http),
        ]
        client = await last.enter_async_context(ResumingHttpClient(urls))
        all_follow(fleet, Script(pause_after=6))
        asking = asyncio.create_task(text_of(client))
        await paused(fleet)
        # The first gateway dies, the second knows of no record, the third begins anew and comes half as far.
        all_follow(fleet, Script(pause_after=3))
        monkeypatch.setattr(fleet.store, "session", unknown)
        fleet.stop.set()
        await fleet.gateway
        await paused(fleet)
        monkeypatch.setattr(fleet.store, "session", known)
        all_follow(fleet, Script())
        await third.aclose()
        assert await asking == fleet.letters(0, 10)


async def test_a_new_request_is_told_when_to_come_again_and_one_that_has_begun_waits_for_its_place(
    tmp_path: Path,
) -> None:
    async with (
        scripted_fleet(tmp_path, num_verifiers=2, grace_s=0.0) as fleet,
        joining_doors(fleet, max_sessions=1) as other,
    ):
        all_follow(fleet, Script(pause_after=6))
        async with (
            ResumingHttpClient([url(other.http)]) as holder,
            ResumingHttpClient([url(fleet.addresses.http), url(other.http)]) as client,
        ):
            holding = asyncio.create_task(text_of(holder))
            held = await paused(fleet)
            with pytest.raises(OverloadedError):
                await text_of(holder)
            asking = asyncio.create_task(text_of(client))
            await paused(fleet)
            fleet.stop.set()
            await fleet.gateway
            # One try for the gateway that ended, and one for the other, which has no place.
            while client.num_resumed < 2:  # noqa: ASYNC110 - only polling shows it
                await asyncio.sleep(0.01)
            all_follow(fleet, Script())
            for verifier in fleet.verifiers:
                verifier.resume(held)
            assert await holding == fleet.letters(0, 10)
            assert await asking == fleet.letters(0, 10)


async def test_what_any_gateway_would_refuse_is_final_and_silence_ends_patience(fleet: ScriptedFleet) -> None:
    async with ResumingHttpClient([url(fleet.addresses.http)]) as client:
        with pytest.raises(RefusedError, match="max_tokens"):
            await text_of(client, max_tokens=100_000)
        all_follow(fleet, Script(fail_after=0, error=EngineDiedError("the engine died")))
        with pytest.raises(RefusedError, match="request_ends_engines"):
            await text_of(client)
    async with ResumingHttpClient([NOWHERE], patience_s=0.0) as client:
        with pytest.raises(UnavailableError, match="no gateway has brought a token in time"):
            await text_of(client)
