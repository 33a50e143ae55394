"""EAGLE-3 over real gRPC: hidden states reach the drafter, its drafts change no token, and strangers are not paired."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.core.params import DRAFT_MODEL, EAGLE3, SpeculationParams
from paceline.service.supervision import TaskSupervisor
from paceline.store.base import Replica
from tests.integration.conftest import know, running_drafter, running_verifier
from tests.integration.test_drafter_service import stream_to
from tests.integration.test_verifier_service import ask
from tests.support.eagle import save_eagle3
from tests.support.memory_store import MemoryStore


@pytest.fixture(scope="module")
def head(tiny_pair, tmp_path_factory):
    return save_eagle3(tmp_path_factory.mktemp("head") / "head", tiny_pair[0], layer_ids=(0, 0, 0), draft_vocab=200)


async def drafted(calls) -> list[int]:
    """Tokens of the first session that had something to verify; the stream takes its time to come up."""
    async with asyncio.timeout(60):
        while True:
            steps = await calls.steps(ask(max_tokens=100))
            if steps[-1].result.speculation.num_draft_tokens:
                return [token_id for each in steps for token_id in each.token_ids]


async def test_a_head_on_another_host_drafts_from_the_states_it_is_sent(tiny_pair, head):
    target = tiny_pair[0]
    async with (
        running_drafter(head, target=target) as (address, drafter),
        running_verifier(target, methods=(EAGLE3,), eagle3_model=head) as (calls, host),
    ):
        plain = await calls.tokens(replace(ask(max_tokens=100), speculation=SpeculationParams(enabled=False)))
        know(host, address)
        assert await drafted(calls) == plain
        assert drafter.identity.states_hash


async def test_a_verifier_that_hands_out_no_states_or_others_is_refused_by_the_drafter(tiny_pair, head):
    async with running_drafter(head, target=tiny_pair[0]) as (address, host):
        for states_hash in ("", "others"):
            stranger = replace(host.identity, states_hash=states_hash)
            async with stream_to(address, None) as stream:
                await stream.say(target=stranger)
                assert await stream.ended() is not grpc.StatusCode.OK
                assert "that the verifier of" in (await stream.call.details())


async def test_a_session_that_names_a_method_goes_to_a_drafter_that_serves_it(tiny_pair, head):
    target, draft_model = tiny_pair
    async with (
        running_drafter(head, target=target) as (of_head, first),
        running_drafter(draft_model) as (of_model, second),
        running_verifier(target, methods=(EAGLE3, DRAFT_MODEL), eagle3_model=head) as (calls, host),
    ):
        store = MemoryStore()
        for address, drafter in ((of_head, first), (of_model, second)):
            replica = Replica(replica_id=address, role="drafter", address=address, identity=drafter.identity)
            await store.announce(replica, 3600)
        async with TaskSupervisor(CollectorRegistry()).kept(host.background(store)):
            for method, own in ((EAGLE3, of_head), (DRAFT_MODEL, of_model)):
                assert await first_drafter_of(calls, host, method) == own


async def first_drafter_of(calls, host, method: str) -> str:
    """Runs sessions of a method until one has a drafter; the registry is read once a second."""
    async with asyncio.timeout(60):
        while True:
            request = replace(ask(method, max_tokens=200), speculation=SpeculationParams(method=method))
            async for _ in calls.generate(request):
                known = host._by_id.get(method)
                if known is not None and known.drafter_address:
                    return known.drafter_address
