"""The verifier over real gRPC: sessions, bad requests, departures, drafters that misbehave."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.core.link import SessionLink
from paceline.core.messages import (
    VERIFIER,
    GenerateRequest,
    ModelIdentity,
    OpenSession,
)
from paceline.core.params import DRAFT_MODEL, SamplingParams, SpeculationParams
from paceline.engine.identity import model_identity
from paceline.model_service import engine_ended
from paceline.rpc.v1 import common_pb2, drafter_pb2_grpc, verifier_pb2
from paceline.service.process import start_grpc_server
from paceline.service.supervision import Supervisor
from paceline.store.base import Replica
from paceline.tier.links import DrafterLink
from paceline.wire import (
    committed_from_pb,
    draft_request_from_pb,
    draft_response_to_pb,
    generate_request_to_pb,
)
from tests.integration.conftest import MAX_MODEL_LEN, MAX_QUEUE, know, running_drafter, running_verifier
from tests.support.guesses import NodeGuess, SessionDrafts, to_drafts
from tests.support.memory_store import MemoryStore
from tests.support.trees import new_tree

PROMPT = tuple(range(5, 25))


def ask(session_id: str = "s", *, max_tokens: int = 24, **sampling) -> GenerateRequest:
    return GenerateRequest(
        session_id=session_id,
        epoch=1,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **sampling),
        speculation=SpeculationParams(),
    )


async def test_a_method_that_is_not_served_is_refused_and_those_that_are_change_no_token(tiny_pair):
    async with running_verifier(tiny_pair[0], methods=("ngram",)) as (stub, _):
        plain = await tokens_of(stub, replace(ask(), speculation=SpeculationParams(enabled=False)))
        assert await tokens_of(stub, replace(ask(), speculation=SpeculationParams(method="ngram"))) == plain
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tokens_of(stub, replace(ask(), speculation=SpeculationParams(method="medusa")))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "speculation.method" in refused.value.details()


async def tokens_of(stub, request: GenerateRequest) -> list[int]:
    tokens: list[int] = []
    async for message in stub.Generate(generate_request_to_pb(request), timeout=30):
        tokens += committed_from_pb(message).token_ids
    return tokens


async def test_a_session_streams_its_tokens_and_ends_with_its_result(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, _):
        messages = [m async for m in stub.Generate(generate_request_to_pb(ask()), timeout=30)]
    results = [committed_from_pb(message).result for message in messages]
    assert results[:-1] == [None] * (len(messages) - 1)
    assert results[-1].num_generated_tokens == 24
    assert results[-1].num_prompt_tokens == len(PROMPT)


async def drafted_tokens(stub, max_tokens: int = 100) -> list[int]:
    """Tokens of the first session whose drafts were of use; the stream to the drafter takes its time to come up."""
    async with asyncio.timeout(60):
        while True:
            tokens: list[int] = []
            request = generate_request_to_pb(ask(max_tokens=max_tokens))
            async for message in stub.Generate(request, timeout=30):
                last = committed_from_pb(message)
                tokens += last.token_ids
            if last.result.speculation.num_accepted_draft_tokens:
                assert last.result.speculation.num_steps < max_tokens
                return tokens


async def test_drafts_save_steps_and_change_nothing(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, host), running_drafter(tiny_pair[1]) as (address, _):
        plain = await tokens_of(stub, ask(max_tokens=100))
        know(host, address)
        assert await drafted_tokens(stub) == plain


async def test_a_session_that_wants_no_speculation_gets_no_drafter(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (_, host):
        know(host, "127.0.0.1:1")
        assert await drafter_of(host, SpeculationParams()) == "127.0.0.1:1"
        for params in (SpeculationParams(enabled=False), SpeculationParams(method="ngram")):
            assert await drafter_of(host, params) == ""


async def test_a_drafter_that_drains_or_cannot_draft_for_the_target_is_not_paired(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (_, host):
        good = Replica(replica_id="d", role="drafter", address="127.0.0.1:1", identity=host.identity)
        changed = [replace(host.identity, vocab_hash="other"), replace(host.identity, states_hash="others"), None]
        bad = [replace(good, draining=True), *(replace(good, identity=identity) for identity in changed)]
        host.drafters.know(bad)
        assert await drafter_of(host, SpeculationParams()) == ""
        host.drafters.know([replace(good, address="127.0.0.1:2"), *bad])
        assert await drafter_of(host, SpeculationParams()) == "127.0.0.1:2"


async def drafter_of(host, speculation: SpeculationParams) -> str:
    """Who is to draft for a session of this kind."""
    session = host.generate(replace(ask(), speculation=speculation))
    await anext(session)
    (under_way,) = host._under_way.values()
    await session.aclose()
    return under_way.drafter_address


BAD_REQUESTS = {
    "prompt_token_ids": lambda m: m.ClearField("prompt_token_ids"),
    "prompt_token_ids[1]": lambda m: m.prompt_token_ids.__setitem__(1, 999_999),
    "max_tokens": lambda m: setattr(m.sampling, "max_tokens", MAX_MODEL_LEN),
    "temperature": lambda m: setattr(m.sampling, "temperature", float("nan")),
    "top_p": lambda m: setattr(m.sampling, "top_p", 2.0),
    "logit_bias[3]": lambda m: m.sampling.logit_bias.append(common_pb2.LogitBias(token_id=3, bias=float("inf"))),
    "stop_token_ids[0]": lambda m: m.sampling.stop_token_ids.append(999_999),
    "speculation.acceptance": lambda m: setattr(m.speculation, "acceptance", "lossy"),
    "sampling": lambda m: m.ClearField("sampling"),
    "session_id": lambda m: m.ClearField("session_id"),
}


async def test_bad_requests_are_answered_by_field_and_the_next_one_works(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, host):
        for field, spoil in BAD_REQUESTS.items():
            message = generate_request_to_pb(ask())
            spoil(message)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                [m async for m in stub.Generate(message, timeout=30)]
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in refused.value.details()
            assert host.num_sessions == 0
        assert len(await tokens_of(stub, ask())) == 24


async def test_an_epoch_under_way_is_refused_and_a_full_verifier_says_when_to_come_back(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, host):
        calls = []
        for index in range(MAX_QUEUE):
            call = stub.Generate(generate_request_to_pb(ask(f"s{index}", max_tokens=200)), timeout=30)
            await call.read()
            calls.append(call)
        assert host.num_sessions == MAX_QUEUE
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tokens_of(stub, ask("one too many"))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls.pop().cancel()
        while host.num_sessions == MAX_QUEUE:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as doubled:
            await tokens_of(stub, ask("s0"))
        assert doubled.value.code() is grpc.StatusCode.ABORTED
        assert "under way here under epoch 1" in doubled.value.details()
        for call in calls:
            call.cancel()


async def test_a_request_that_would_wait_longer_than_it_may_is_refused_and_one_that_goes_on_is_not(tiny_pair):
    async with running_verifier(tiny_pair[0], max_num_seqs=1) as (stub, _):
        over = asyncio.Event()

        async def busy(name: str) -> None:
            for index in itertools.count():
                assert len(await tokens_of(stub, ask(f"{name}{index}"))) == 24
                if over.is_set():
                    return

        # Sessions that end while another waits tell how long a place takes: from then on somebody always waits.
        crowd = [asyncio.create_task(busy(name)) for name in "ab"]
        async with asyncio.timeout(60):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                for index in itertools.count():
                    await tokens_of(stub, replace(ask(f"impatient{index}"), max_wait_s=0.0))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "the request may wait 0.0 s" in refused.value.details()
        goes_on = replace(ask("goes on"), committed_token_ids=(1,), max_wait_s=0.0)
        assert len(await tokens_of(stub, goes_on)) == 23
        over.set()
        await asyncio.gather(*crowd)


async def test_a_newer_owner_goes_on_and_the_stream_of_the_older_one_ends(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, host):
        plain = await tokens_of(stub, ask(max_tokens=200))
        older = stub.Generate(generate_request_to_pb(ask(max_tokens=200)), timeout=30)
        messages = aiter(older)
        known = committed_from_pb(await anext(messages)).token_ids
        newer = replace(ask(max_tokens=200), epoch=2, committed_token_ids=known)
        rest = await tokens_of(stub, newer)
        assert [*known, *rest] == plain
        with pytest.raises(grpc.aio.AioRpcError) as fenced:
            async for _ in messages:
                pass
        assert fenced.value.code() is grpc.StatusCode.ABORTED
        assert "goes on under epoch 2" in fenced.value.details()
        while host.num_sessions:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(0)
        assert await tokens_of(stub, ask(max_tokens=200)) == plain


async def test_sessions_are_served_without_drafters_and_take_one_that_appears_and_none_that_is_dead(tiny_pair):
    store = MemoryStore()
    async with (
        running_verifier(tiny_pair[0]) as (stub, host),
        running_drafter(tiny_pair[1]) as (address, drafter),
        Supervisor(CollectorRegistry()).kept(host.background(store)),
    ):
        plain = await tokens_of(stub, ask(max_tokens=200))
        # Nobody listens at the first of these addresses, which is the one that is tried first.
        for each in ("127.0.0.1:1", address):
            replica = Replica(replica_id=each, role="drafter", address=each, identity=drafter.identity)
            await store.announce(replica, 3600)
        accepted = 0
        async with asyncio.timeout(60):
            while not accepted:
                last, tokens = None, []
                call = stub.Generate(generate_request_to_pb(ask(max_tokens=200)), timeout=30)
                async for message in call:
                    last = committed_from_pb(message)
                    tokens += last.token_ids
                    await asyncio.sleep(0.01)
                assert tokens == plain
                accepted = last.result.speculation.num_accepted_draft_tokens


async def test_a_draining_verifier_finishes_what_runs_and_refuses_the_rest(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, host):
        messages = aiter(stub.Generate(generate_request_to_pb(ask(max_tokens=200)), timeout=30))
        first = committed_from_pb(await anext(messages))
        drain = asyncio.create_task(host.wind_down())
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await tokens_of(stub, ask("late"))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        rest = [committed_from_pb(message) async for message in messages]
        assert len(first.token_ids) + sum(len(each.token_ids) for each in rest) == 200
        await drain


async def test_a_verifier_told_to_stop_lets_running_sessions_end(tiny_pair):
    """As `serving.until_stopped` does it: the wait for the engine's end is cancelled, then the host winds down."""
    async with running_verifier(tiny_pair[0]) as (stub, host):
        messages = aiter(stub.Generate(generate_request_to_pb(ask(max_tokens=200)), timeout=30))
        first = committed_from_pb(await anext(messages))
        watch = asyncio.create_task(engine_ended(host, VERIFIER))
        await asyncio.sleep(0)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        winding_down = asyncio.create_task(host.wind_down())
        rest = [committed_from_pb(message) async for message in messages]
        assert len(first.token_ids) + sum(len(each.token_ids) for each in rest) == 200
        await winding_down


async def test_a_session_id_may_come_back_at_once_after_its_client_left(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (_, host):
        plain = [token async for step in host.generate(ask("plain", max_tokens=60)) for token in step.token_ids]
        for _ in range(10):
            left = host.generate(ask(max_tokens=200))
            await anext(left)
            await left.aclose()
            again = [token async for step in host.generate(ask(max_tokens=60)) for token in step.token_ids]
            assert again == plain


class Misbehaving(drafter_pb2_grpc.DrafterServicer):
    """A drafter by the book until it has read so many messages, then `script` decides what it says."""

    def __init__(self, identity: ModelIdentity, script) -> None:
        self.identity = identity
        self.script = script
        self.num_streams = 0

    async def Draft(self, request_iterator, context) -> AsyncIterator:
        self.num_streams += 1
        async for request in request_iterator:
            target, messages = draft_request_from_pb(request)
            if target is not None:
                yield draft_response_to_pb((), draft=self.identity)
            for message in messages:
                answer = self.script(message)
                if answer is not None:
                    yield answer


@asynccontextmanager
async def misbehaving_drafter(identity: ModelIdentity, script):
    servicer = Misbehaving(identity, script)
    server = await start_grpc_server(
        host="127.0.0.1",
        port=0,
        add_servicers=lambda it: drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, it),
        service_names=["paceline.rpc.v1.Drafter"],
    )
    yield server.address, servicer
    await server.stop(0)


def drafts_for(message, base_len, guess):
    if not isinstance(message, OpenSession):
        return None
    return draft_response_to_pb([to_drafts(SessionDrafts(message.number, base_len, [guess]))])


def far_ahead(message):
    guess = NodeGuess(node_id=1, parent_id=0, token_id=1, confidence=1.0)
    return drafts_for(message, 10_000, guess)


def ragged(message):
    guess = NodeGuess(node_id=1, parent_id=0, token_id=1, confidence=1.0)
    answer = drafts_for(message, 20, guess)
    if answer is not None:
        answer.drafts[0].parent_ids += b"\x07\x00\x00\x00"
    return answer


def outside_the_vocabulary(message):
    guess = NodeGuess(node_id=1, parent_id=0, token_id=2_000_000_000, confidence=1.0)
    return drafts_for(message, 20, guess)


@pytest.mark.parametrize("script", [far_ahead, ragged])
async def test_a_drafter_that_talks_nonsense_loses_its_stream_and_nothing_else(tiny_pair, script):
    async with running_verifier(tiny_pair[0]) as (stub, host):
        plain = await tokens_of(stub, ask(max_tokens=200))
        async with misbehaving_drafter(host.identity, script) as (address, servicer):
            know(host, address)
            assert await tokens_of(stub, ask(max_tokens=200)) == plain
            while servicer.num_streams < 2:
                assert await tokens_of(stub, ask(max_tokens=200)) == plain


async def test_guesses_outside_the_vocabulary_are_passed_over(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, host):
        plain = await tokens_of(stub, ask(max_tokens=200))
        async with misbehaving_drafter(host.identity, outside_the_vocabulary) as (address, servicer):
            know(host, address)
            for _ in range(3):
                assert await tokens_of(stub, ask(max_tokens=200)) == plain
            assert servicer.num_streams <= 1


async def test_a_drafter_for_another_vocabulary_is_not_used(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, host):
        stranger = ModelIdentity(name="stranger", vocab_hash="other", vocab_size=9, context_len=9)
        plain = await tokens_of(stub, ask(max_tokens=100))
        async with misbehaving_drafter(stranger, far_ahead) as (address, servicer):
            know(host, address)
            assert await tokens_of(stub, ask(max_tokens=100)) == plain
            while not servicer.num_streams:  # noqa: ASYNC110 - nor does the scripted drafter
                await asyncio.sleep(0.01)


async def test_sixty_four_long_sessions_are_opened_anew_at_a_drafter_without_losing_its_stream(tiny_pair):
    tokens = tuple(range(100_000, 200_000))
    opens = [
        replace(
            SessionLink(ask(f"s{index}"), [1], new_tree([1]), {}).open(), number=1 + index, room=8, token_ids=tokens
        )
        for index in range(64)
    ]
    heard: list[tuple[str, int]] = []
    up, last = asyncio.Event(), asyncio.Event()

    async def unheard(*_) -> None:
        """Of what the drafter says."""

    def hear(message):
        heard.append((message.session_id, len(message.token_ids)))
        if len(heard) == len(opens):
            last.set()

    identity = model_identity(tiny_pair[0], "tiny")
    async with misbehaving_drafter(identity, hear) as (address, servicer):
        link = DrafterLink(address, identity, lambda _, draft: up.set() if draft else up.clear(), unheard)
        await asyncio.wait_for(up.wait(), 30)
        link.send(opens)
        await asyncio.wait_for(last.wait(), 60)
        assert heard == [(each.session_id, len(tokens)) for each in opens]
        assert (servicer.num_streams, up.is_set()) == (1, True)
        await link.close()


async def test_the_way_to_a_drafter_is_measured_and_counted_from_then_on(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (_, host), running_drafter(tiny_pair[1]) as (address, drafter):
        near, far = (
            Replica(replica_id=name, role="drafter", address=at, identity=drafter.identity, max_sessions=8)
            for name, at in (("near", address), ("far", "127.0.0.1:1"))
        )
        host.drafters.know([far, near])
        assert host.drafters.choose((DRAFT_MODEL,)) == far.address, "the first of two that seem alike"
        host.drafters.know([near])
        assert host.drafters.choose((DRAFT_MODEL,)) == address
        async with asyncio.timeout(20):
            while (round_trip_s := host.drafters._links[address].round_trip_s) is None:  # noqa: ASYNC110 - told nobody
                await asyncio.sleep(0.01)
        assert 0 < round_trip_s < 1


async def test_drafters_beyond_the_bound_are_not_dialled_and_their_sessions_served(tiny_pair, monkeypatch):
    monkeypatch.setattr("paceline.tier.drafters.MAX_LINKS", 2)
    async with running_verifier(tiny_pair[0]) as (stub, host):
        plain = await tokens_of(stub, ask())
        for port in (1, 2, 3, 1):
            know(host, f"127.0.0.1:{port}")
            assert await tokens_of(stub, ask()) == plain
        assert set(host.drafters._links) == {"127.0.0.1:1", "127.0.0.1:2"}


async def test_a_drafter_that_comes_back_is_used_again(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, host):
        plain = await tokens_of(stub, ask(max_tokens=100))
        async with running_drafter(tiny_pair[1]) as (address, _):
            know(host, address)
            assert await drafted_tokens(stub) == plain
        assert await tokens_of(stub, ask(max_tokens=100)) == plain
        async with running_drafter(tiny_pair[1], port=int(address.rpartition(":")[2])):
            assert await drafted_tokens(stub) == plain


async def test_garbage_bytes_are_refused_and_the_next_request_works(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (stub, _):
        call = stub.Generate(verifier_pb2.VerifierGenerateRequest(session_id="x"), timeout=30)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(await tokens_of(stub, ask())) == 24
