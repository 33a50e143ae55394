"""A client that knows several gateways gets each token once, whatever happens to one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.client.resuming import ResumingClient
from paceline.core.errors import InvalidRequestError, SessionNotFoundError, UnavailableError
from paceline.rpc.v1 import common_pb2, gateway_pb2
from tests.support.scripted_fleet import MODEL, Script, ScriptedFleet, joining_gateway, scripted_fleet

NOWHERE = "127.0.0.1:1"


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[ScriptedFleet]:
    async with scripted_fleet(tmp_path, num_verifiers=2, grace_s=0.0) as started:
        yield started


def request(max_tokens: int = 10, **speculation: Any) -> gateway_pb2.GatewayGenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens, seed=0)
    asked = gateway_pb2.GatewayGenerateRequest(model=MODEL, prompt="x", sampling=sampling)
    if speculation:
        asked.speculation.CopyFrom(common_pb2.SpeculationParams(enabled=True, **speculation))
    return asked


async def whole(client: ResumingClient, **speculation: Any) -> tuple[str, int]:
    pieces = [piece async for piece in client.stream(request(**speculation))]
    assert [piece.HasField("result") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return "".join(piece.text for piece in pieces), sum(len(piece.token_ids) for piece in pieces)


async def test_a_gateway_that_is_not_there_is_passed_over(fleet: ScriptedFleet) -> None:
    async with ResumingClient([NOWHERE, fleet.addresses.grpc]) as client:
        for _ in range(2):
            assert await whole(client) == (fleet.letters(0, 10), 10)


@pytest.mark.parametrize("recorded", [True, False])
async def test_a_stream_outlives_its_gateway_with_or_without_a_record(
    fleet: ScriptedFleet, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(session_id: str) -> None:
        del session_id

    for verifier in fleet.verifiers:
        verifier.script = Script(pause_after=6)
    async with (
        joining_gateway(fleet) as other,
        ResumingClient([fleet.addresses.grpc, other]) as client,
    ):
        asking = asyncio.create_task(whole(client))
        waits = [asyncio.create_task(verifier.paused.get()) for verifier in fleet.verifiers]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        [session_id] = [wait.result() for wait in waits if wait.done()]
        for wait in waits:
            wait.cancel()
        for verifier in fleet.verifiers:
            verifier.script = Script()
        if recorded:
            async with asyncio.timeout(30):
                while (logged := await fleet.store.session(session_id)) is None or logged.record.committed_len < 6:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        else:
            monkeypatch.setattr(fleet.store, "session", unknown)
        fleet.stop.set()
        await fleet.gateway
        assert await asking == (fleet.letters(0, 10), 10)
        assert client.num_resumed
    resumed = [len(each.committed_token_ids) for verifier in fleet.verifiers for each in verifier.requests]
    assert sorted(resumed) == ([0, 6] if recorded else [0, 0])


async def test_a_new_beginning_that_breaks_off_before_it_got_as_far_is_resumed_without_a_gap(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = fleet.store.session

    async def unknown(session_id: str) -> None:
        del session_id

    async def paused() -> None:
        waits = [asyncio.create_task(verifier.paused.get()) for verifier in fleet.verifiers]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def script(pause_after: int | None) -> None:
        for verifier in fleet.verifiers:
            verifier.script = Script(pause_after=pause_after)

    async with AsyncExitStack() as last, AsyncExitStack() as third:
        addresses = [
            fleet.addresses.grpc,
            await last.enter_async_context(joining_gateway(fleet)),
            await third.enter_async_context(joining_gateway(fleet, grace_s=0.0)),
        ]
        client = await last.enter_async_context(ResumingClient(addresses))
        script(pause_after=6)
        asking = asyncio.create_task(whole(client))
        await paused()
        # The first gateway dies, the second knows of no record, the third begins anew and comes half as far.
        script(pause_after=3)
        monkeypatch.setattr(fleet.store, "session", unknown)
        fleet.stop.set()
        await fleet.gateway
        await paused()
        monkeypatch.setattr(fleet.store, "session", known)
        script(pause_after=None)
        await third.aclose()
        assert await asking == (fleet.letters(0, 10), 10)


async def test_a_lost_session_is_not_begun_anew_under_a_rule_that_would_give_other_tokens(
    fleet: ScriptedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unknown(session_id: str) -> None:
        del session_id

    for verifier in fleet.verifiers:
        verifier.script = Script(pause_after=6)
    async with joining_gateway(fleet) as other, ResumingClient([fleet.addresses.grpc, other]) as client:
        pieces = aiter(client.stream(request(acceptance="rejection")))
        # A client that has nothing of a text yet may begin another.
        assert (await anext(pieces)).text
        monkeypatch.setattr(fleet.store, "session", unknown)
        fleet.stop.set()
        await fleet.gateway
        with pytest.raises(SessionNotFoundError):
            async for _ in pieces:
                pass


@pytest.mark.parametrize("acceptance", ["", "coupled", "rejection"])
async def test_a_client_that_may_begin_anew_asks_for_the_rule_that_gives_the_same_tokens_unless_told_otherwise(
    fleet: ScriptedFleet, acceptance: str
) -> None:
    async with ResumingClient([fleet.addresses.grpc]) as client:
        await whole(client)
        await whole(client, acceptance=acceptance)
    asked = [each.speculation for verifier in fleet.verifiers for each in verifier.requests]
    assert {each.acceptance for each in asked} == {"coupled", acceptance or "coupled"}
    assert all(each.enabled for each in asked)


async def test_without_any_gateway_it_gives_up_in_the_end() -> None:
    async with ResumingClient([NOWHERE], patience_s=0.2) as client:
        with pytest.raises(UnavailableError, match="no gateway has brought a token in time"):
            await whole(client)


async def test_what_a_gateway_refuses_is_not_tried_again(fleet: ScriptedFleet) -> None:
    async with ResumingClient([fleet.addresses.grpc]) as client:
        with pytest.raises(InvalidRequestError, match=r"sampling\.max_tokens"):
            async for _ in client.stream(request(max_tokens=100_000)):
                pass
        with pytest.raises(InvalidRequestError, match="holds the seed"):
            async for _ in client.stream(gateway_pb2.GatewayGenerateRequest(prompt="x")):
                pass
    assert not fleet.verifier.requests
