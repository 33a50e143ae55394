"""The verifier over real gRPC: sessions, bad requests, departures, drafters that misbehave."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace

import grpc
import pytest
from prometheus_client import CollectorRegistry

from paceline.core.errors import (
    InvalidRequestError,
    OverloadedError,
    PeerLostError,
    RemoteProtocolError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.link import SessionLink
from paceline.core.messages import (
    VERIFIER,
    GenerateRequest,
    ModelIdentity,
    OpenSession,
)
from paceline.core.params import DRAFT_MODEL, SamplingParams, SpeculationParams
from paceline.engine.loading import model_identity
from paceline.model_service import engine_ended
from paceline.rpc.v1 import common_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from paceline.service.process import start_grpc_server
from paceline.service.supervision import TaskSupervisor
from paceline.store.base import Replica
from paceline.tier.links import DrafterLink
from paceline.verifier import commit_log
from paceline.wire import draft_request_from_pb, draft_response_to_pb, start_session_to_pb
from paceline.wire.columns import WORD
from paceline.wire.common import PROTOCOL
from tests.integration.conftest import MAX_MODEL_LEN, MAX_QUEUE, know, running_drafter, running_verifier, verifier_at
from tests.support.guesses import NodeGuess, SessionDrafts, to_drafts
from tests.support.log_stream import verifier_calls
from tests.support.memory_store import MemoryStore
from tests.support.poison import Poison
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
    async with running_verifier(tiny_pair[0], methods=("ngram",)) as (calls, _):
        plain = await calls.tokens(replace(ask(), speculation=SpeculationParams(enabled=False)))
        assert await calls.tokens(replace(ask(), speculation=SpeculationParams(method="ngram"))) == plain
        with pytest.raises(InvalidRequestError, match=r"speculation\.method"):
            await calls.tokens(replace(ask(), speculation=SpeculationParams(method="medusa")))


async def drafted_tokens(calls, max_tokens: int = 100) -> list[int]:
    """Tokens of the first session whose drafts were of use; the stream to the drafter takes its time to come up."""
    async with asyncio.timeout(60):
        while True:
            steps = await calls.steps(ask(max_tokens=max_tokens))
            speculation = steps[-1].result.speculation
            if speculation.num_accepted_draft_tokens:
                assert speculation.num_steps < max_tokens
                return [token_id for each in steps for token_id in each.token_ids]


async def test_a_session_that_wants_no_speculation_gets_no_drafter(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (calls, host):
        know(host, "127.0.0.1:1")
        assert await drafter_of(calls, host, SpeculationParams()) == "127.0.0.1:1"
        for params in (SpeculationParams(enabled=False), SpeculationParams(method="ngram")):
            assert await drafter_of(calls, host, params) == ""


async def test_a_drafter_that_drains_or_cannot_draft_for_the_target_is_not_paired(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (calls, host):
        good = Replica(replica_id="d", role="drafter", address="127.0.0.1:1", identity=host.identity)
        changed = [replace(host.identity, vocab_hash="other"), replace(host.identity, states_hash="others"), None]
        bad = [replace(good, draining=True), *(replace(good, identity=identity) for identity in changed)]
        host.drafters.know(bad)
        assert await drafter_of(calls, host, SpeculationParams()) == ""
        host.drafters.know([replace(good, address="127.0.0.1:2"), *bad])
        assert await drafter_of(calls, host, SpeculationParams()) == "127.0.0.1:2"


async def drafter_of(calls, host, speculation: SpeculationParams) -> str:
    """Who is to draft for a session of this kind."""
    async with aclosing(calls.generate(replace(ask(), speculation=speculation))) as session:
        await anext(session)
        (under_way,) = host._sessions.values()
    while host.num_sessions:  # noqa: ASYNC110 - the host tells nobody
        await asyncio.sleep(0)
    return under_way.drafter_address


BAD_REQUESTS = {
    "prompt_token_ids": lambda m: m.ClearField("prompt_token_ids"),
    "prompt_token_ids[1]": lambda m: m.prompt_token_ids.__setitem__(1, 999_999),
    "max_tokens": lambda m: setattr(m.params.sampling, "max_tokens", MAX_MODEL_LEN),
    "temperature": lambda m: setattr(m.params.sampling, "temperature", float("nan")),
    "top_p": lambda m: setattr(m.params.sampling, "top_p", 2.0),
    "logit_bias[3]": lambda m: m.params.sampling.logit_bias.append(common_pb2.LogitBias(token_id=3, bias=float("inf"))),
    "stop_token_ids[0]": lambda m: m.params.sampling.stop_token_ids.append(999_999),
    "speculation.acceptance": lambda m: setattr(m.params.speculation, "acceptance", "lossy"),
    "sampling": lambda m: m.params.ClearField("sampling"),
    "session_id": lambda m: m.ClearField("session_id"),
}


async def test_bad_requests_are_answered_by_field_and_the_next_one_works(tiny_pair):
    async with verifier_at(tiny_pair[0]) as (address, host), told(address) as stream:
        for number, (field, spoil) in enumerate(BAD_REQUESTS.items(), start=1):
            message = start_session_to_pb(number, ask())
            spoil(message)
            await stream.say(starts=[message])
            error = (await stream.hear_of(number, "errors")).errors[0]
            assert (error.kind, error.number) == ("InvalidRequestError", number)
            assert field in f"{error.field}: {error.problem}"
            assert host.num_sessions == 0
        await stream.say(starts=[start_session_to_pb(99, ask())])
        assert (await stream.hear_of(99, "results")).results[0].num_generated_tokens == 24


async def test_an_epoch_under_way_is_refused_and_a_full_verifier_says_when_to_come_back(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (calls, host):
        sessions = [calls.generate(ask(f"s{index}", max_tokens=200)) for index in range(MAX_QUEUE)]
        for session in sessions:
            await anext(session)
        assert host.num_sessions == MAX_QUEUE
        with pytest.raises(OverloadedError):
            await calls.tokens(ask("one too many"))
        await sessions.pop().aclose()
        while host.num_sessions == MAX_QUEUE:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(0)
        with pytest.raises(StaleEpochError, match="under way here under epoch 1"):
            await calls.tokens(ask("s0"))
        for session in sessions:
            await session.aclose()


async def test_a_request_that_would_wait_longer_than_it_may_is_refused_and_one_that_goes_on_is_not(tiny_pair):
    async with running_verifier(tiny_pair[0], max_num_seqs=1) as (calls, _):
        over = asyncio.Event()

        async def busy(name: str) -> None:
            for index in itertools.count():
                assert len(await calls.tokens(ask(f"{name}{index}"))) == 24
                if over.is_set():
                    return

        # Sessions that end while another waits tell how long a place takes: from then on somebody always waits.
        crowd = [asyncio.create_task(busy(name)) for name in "ab"]
        async with asyncio.timeout(60):
            with pytest.raises(OverloadedError, match=r"the request may wait 0\.0 s"):
                for index in itertools.count():
                    await calls.tokens(replace(ask(f"impatient{index}"), max_wait_s=0.0))
        goes_on = replace(ask("goes on"), committed_token_ids=(1,), max_wait_s=0.0)
        assert len(await calls.tokens(goes_on)) == 23
        over.set()
        await asyncio.gather(*crowd)


async def test_a_newer_owner_goes_on_and_the_stream_of_the_older_one_ends(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (calls, host):
        plain = await calls.tokens(ask(max_tokens=200))
        older = calls.generate(ask(max_tokens=200))
        known = (await anext(older)).token_ids
        newer = replace(ask(max_tokens=200), epoch=2, committed_token_ids=known)
        rest = await calls.tokens(newer)
        assert [*known, *rest] == plain
        with pytest.raises(StaleEpochError, match="goes on under epoch 2"):
            async for _ in older:
                pass
        while host.num_sessions:  # noqa: ASYNC110 - the host tells nobody
            await asyncio.sleep(0)
        assert await calls.tokens(ask(max_tokens=200)) == plain


async def test_sessions_are_served_without_drafters_and_take_one_that_appears_and_none_that_is_dead(tiny_pair):
    store = MemoryStore()
    async with (
        running_verifier(tiny_pair[0]) as (calls, host),
        running_drafter(tiny_pair[1]) as (address, drafter),
        TaskSupervisor(CollectorRegistry()).kept(host.background(store)),
    ):
        plain = await calls.tokens(ask(max_tokens=200))
        # Nobody listens at the first of these addresses, which is the one that is tried first.
        for each in ("127.0.0.1:1", address):
            replica = Replica(replica_id=each, role="drafter", address=each, identity=drafter.identity)
            await store.announce(replica, 3600)
        accepted = 0
        async with asyncio.timeout(60):
            while not accepted:
                last, tokens = None, []
                async for last in calls.generate(ask(max_tokens=200)):
                    tokens += last.token_ids
                    await asyncio.sleep(0.01)
                assert tokens == plain
                accepted = last.result.speculation.num_accepted_draft_tokens


async def test_a_draining_verifier_finishes_what_runs_and_refuses_the_rest(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (calls, host):
        messages = calls.generate(ask(max_tokens=200))
        first = await anext(messages)
        drain = asyncio.create_task(host.wind_down())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shuts down"):
            await calls.tokens(ask("late"))
        rest = [each async for each in messages]
        assert len(first.token_ids) + sum(len(each.token_ids) for each in rest) == 200
        await drain


async def test_a_verifier_told_to_stop_lets_running_sessions_end(tiny_pair):
    """As `serving.until_stopped` does it: the wait for the engine's end is cancelled, then the host winds down."""
    async with running_verifier(tiny_pair[0]) as (calls, host):
        messages = calls.generate(ask(max_tokens=200))
        first = await anext(messages)
        watch = asyncio.create_task(engine_ended(host, VERIFIER))
        await asyncio.sleep(0)
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        winding_down = asyncio.create_task(host.wind_down())
        rest = [each async for each in messages]
        assert len(first.token_ids) + sum(len(each.token_ids) for each in rest) == 200
        await winding_down


async def test_a_session_id_may_come_back_at_once_after_its_client_left(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (calls, _):
        plain = await calls.tokens(ask("plain", max_tokens=60))
        for _ in range(10):
            left = calls.generate(ask(max_tokens=200))
            await anext(left)
            await left.aclose()
            assert await calls.tokens(ask(max_tokens=60)) == plain


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


async def test_a_drafter_for_another_vocabulary_is_not_used(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (calls, host):
        stranger = ModelIdentity(name="stranger", vocab_hash="other", vocab_size=9, context_len=9)
        plain = await calls.tokens(ask(max_tokens=100))
        async with misbehaving_drafter(stranger, far_ahead) as (address, servicer):
            know(host, address)
            assert await calls.tokens(ask(max_tokens=100)) == plain
            while not servicer.num_streams:  # noqa: ASYNC110 - nor does the scripted drafter
                await asyncio.sleep(0.01)


async def test_sixty_four_long_sessions_are_opened_anew_at_a_drafter_without_losing_its_stream(tiny_pair):
    tokens = tuple(range(100_000, 200_000))
    opens = [
        replace(SessionLink(ask(f"s{index}"), 1 + index, [1], new_tree([1]), {}).open(), room=8, token_ids=tokens)
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
    async with running_verifier(tiny_pair[0]) as (calls, host):
        plain = await calls.tokens(ask())
        for port in (1, 2, 3, 1):
            know(host, f"127.0.0.1:{port}")
            assert await calls.tokens(ask()) == plain
        assert set(host.drafters._links) == {"127.0.0.1:1", "127.0.0.1:2"}


async def test_a_drafter_that_comes_back_is_used_again(tiny_pair):
    async with running_verifier(tiny_pair[0]) as (calls, host):
        plain = await calls.tokens(ask(max_tokens=100))
        async with running_drafter(tiny_pair[1]) as (address, _):
            know(host, address)
            assert await drafted_tokens(calls) == plain
        assert await calls.tokens(ask(max_tokens=100)) == plain
        async with running_drafter(tiny_pair[1], port=int(address.rpartition(":")[2])):
            assert await drafted_tokens(calls) == plain


class TellingStream:
    """A gateway's end of a stream, message by message."""

    def __init__(self, call) -> None:
        self._call = call

    async def say(self, **fields) -> None:
        await self._call.write(verifier_pb2.VerifyRequest(**fields))

    async def hear(self) -> verifier_pb2.VerifyResponse:
        return await asyncio.wait_for(self._call.read(), 30)

    async def hear_of(self, number: int, field: str) -> verifier_pb2.VerifyResponse:
        """The next message that tells this of a session."""
        while True:
            message = await self.hear()
            assert isinstance(message, verifier_pb2.VerifyResponse), "the stream has ended"
            if any(each.number == number for each in getattr(message, field)):
                return message


@asynccontextmanager
async def told(address: str, protocol: int = PROTOCOL):
    async with grpc.aio.insecure_channel(address) as channel:
        stream = TellingStream(verifier_pb2_grpc.VerifierStub(channel).Verify())
        await stream.say(protocol=protocol)
        assert protocol != PROTOCOL or (await stream.hear()).protocol == PROTOCOL
        yield stream


async def test_a_gateway_of_another_version_is_refused_with_both_numbers(tiny_pair):
    async with verifier_at(tiny_pair[0]) as (address, _), told(address, PROTOCOL + 1) as stream:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.hear()
    assert f"the gateway speaks version {PROTOCOL + 1} and we speak {PROTOCOL}" in refused.value.details()


async def test_a_number_that_comes_back_ends_the_stream_and_frees_its_sessions(tiny_pair):
    async with verifier_at(tiny_pair[0]) as (address, host), told(address) as stream:
        await stream.say(starts=[start_session_to_pb(2, ask("a", max_tokens=200))])
        await stream.say(starts=[start_session_to_pb(2, ask("b"))])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            while True:
                await stream.hear()
        assert "StartSession.number: must be above 2, got 2" in refused.value.details()
        async with asyncio.timeout(30):
            while host.num_sessions:  # noqa: ASYNC110 - the host tells nobody
                await asyncio.sleep(0.01)


async def test_a_gateway_that_starts_sessions_and_reads_nothing_of_them_is_cut_off(tiny_pair, monkeypatch):
    monkeypatch.setattr(commit_log, "MAX_SESSIONS", 2)
    async with verifier_at(tiny_pair[0]) as (address, host), told(address) as stream:
        await stream.say(starts=[start_session_to_pb(n, ask(f"s{n}", max_tokens=200)) for n in (1, 2, 3)])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            while True:
                await stream.hear()
        assert "the gateway does not read its log" in refused.value.details()
        assert host.num_sessions == 0


async def test_sessions_of_a_step_come_in_one_message_and_one_that_leaves_gets_its_record(tiny_pair):
    slow = Poison(step_s=0.01, deadly=False)
    async with verifier_at(tiny_pair[0], poison=slow) as (address, host), told(address) as stream:
        await stream.say(starts=[start_session_to_pb(n, ask(f"s{n}", max_tokens=200)) for n in (1, 2, 3)])
        message = await stream.hear()
        while not (len(message.sessions) == 3 * WORD.itemsize and message.token_ids):
            message = await stream.hear()
        await stream.say(leaves=[2])
        record = (await stream.hear_of(2, "records")).records[0].speculation
        assert record.num_steps > 0
        await stream.hear_of(3, "results")
        assert host.num_sessions == 0


class OfAnotherVersion(verifier_pb2_grpc.VerifierServicer):
    async def Verify(self, request_iterator, context) -> AsyncIterator:
        yield verifier_pb2.VerifyResponse(protocol=PROTOCOL + 1)


@pytest.mark.parametrize(
    ("servicer", "problem"),
    [
        (OfAnotherVersion(), rf"speaks version {PROTOCOL + 1} and we speak {PROTOCOL}"),
        (None, rf"speaks a version before {PROTOCOL}, which we speak"),
    ],
)
async def test_a_verifier_of_another_version_is_refused_with_both_numbers(servicer, problem):
    server = await start_grpc_server(
        host="127.0.0.1",
        port=0,
        add_servicers=lambda it: servicer and verifier_pb2_grpc.add_VerifierServicer_to_server(servicer, it),
        service_names=["paceline.rpc.v1.Verifier"],
    )
    try:
        async with verifier_calls(server.address) as calls:
            with pytest.raises(RemoteProtocolError, match=problem):
                for _ in range(5):
                    # Where gRPC has lost the reason, the stream is dialled anew.
                    with suppress(PeerLostError):
                        await calls.tokens(ask())
    finally:
        await server.stop(0)
