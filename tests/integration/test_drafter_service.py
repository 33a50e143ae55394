"""The drafter over real gRPC: one stream's faults never reach another's."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from paceline.core.messages import (
    Commit,
    Commits,
    Drafts,
    ModelIdentity,
    OpenSession,
)
from paceline.core.params import SamplingParams
from paceline.rpc.v1 import drafter_pb2, drafter_pb2_grpc
from paceline.wire import draft_request_to_pb, draft_response_from_pb
from tests.integration.conftest import running_drafter
from tests.support.guesses import SessionDrafts, by_session, to_commits


def opened(session_id: str = "s", epoch: int = 1, length: int = 10, room: int = 8, number: int = 7) -> OpenSession:
    return OpenSession(
        session_id=session_id,
        epoch=epoch,
        number=number,
        token_ids=tuple(range(length)),
        prompt_len=length,
        sampling=SamplingParams(max_tokens=64, temperature=0.0),
        price=0.0,
        room=room,
    )


def committed(number: int = 7, base_len: int = 10, token_ids=(1,)) -> Commits:
    return to_commits(Commit(number, base_len, [*token_ids], price=0.0, room=8))


class Stream:
    """A verifier's end of a stream."""

    def __init__(self, call) -> None:
        self.call = call

    async def say(self, *messages, target: ModelIdentity | None = None) -> None:
        await self.call.write(draft_request_to_pb(messages, target=target))

    async def hear(self) -> list:
        """Messages of the next response."""
        async with asyncio.timeout(20):
            response = await self.call.read()
        assert response is not grpc.aio.EOF, "the stream has ended"
        return draft_response_from_pb(response)[1]

    async def ended(self) -> grpc.StatusCode:
        """Reads to the end and returns the status."""
        async with asyncio.timeout(20):
            try:
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError:
                pass
            return await self.call.code()


@asynccontextmanager
async def stream_to(address: str, identity: ModelIdentity | None):
    async with grpc.aio.insecure_channel(address) as channel:
        stub: drafter_pb2_grpc.DrafterAsyncStub = drafter_pb2_grpc.DrafterStub(channel)
        stream = Stream(stub.Draft(timeout=60))
        if identity is not None:
            await stream.say(target=identity)
            await stream.hear()
        yield stream


async def drafts_of(stream: Stream) -> list[SessionDrafts]:
    return [each for message in await stream.hear() if isinstance(message, Drafts) for each in by_session(message)]


async def test_an_opened_session_gets_nodes_and_a_commit_prunes_them(tiny_pair):
    async with running_drafter(tiny_pair[1]) as (address, host), stream_to(address, host.identity) as stream:
        await stream.say(opened())
        [(number, base_len, nodes)] = await drafts_of(stream)
        assert (number, base_len) == (7, 10)
        best = nodes[0]
        assert best.parent_id == 0
        await stream.say(committed(token_ids=(best.token_id,)))
        async with asyncio.timeout(20):
            while base_len == 10:
                [(number, base_len, nodes)] = await drafts_of(stream)
        assert base_len == 11


BAD = {
    "no target named": (None, draft_request_to_pb([opened()])),
    "contradiction": ("target", draft_request_to_pb([opened(), committed(base_len=5, token_ids=(99,))])),
    "no tokens": (
        "target",
        drafter_pb2.DraftRequest(opens=[drafter_pb2.OpenSession(session_id="s", epoch=1, number=7)]),
    ),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_verifier_that_breaks_the_protocol_loses_its_stream_and_nobody_elses(tiny_pair, what):
    who, message = BAD[what]
    async with running_drafter(tiny_pair[1]) as (address, host):
        async with stream_to(address, host.identity) as good:
            await good.say(opened("good"))
            await good.hear()
            async with stream_to(address, host.identity if who else None) as bad:
                await bad.call.write(message)
                assert await bad.ended() is grpc.StatusCode.INVALID_ARGUMENT
            await good.say(committed(token_ids=(250,)))
            assert await good.hear()


async def test_another_vocabulary_is_refused_with_both_names(tiny_pair):
    stranger = ModelIdentity(name="stranger", vocab_hash="other", vocab_size=9, context_len=9)
    async with running_drafter(tiny_pair[1]) as (address, _), stream_to(address, None) as stream:
        await stream.say(target=stranger)
        assert await stream.ended() is grpc.StatusCode.FAILED_PRECONDITION
        assert "tiny-drafter" in await stream.call.details()
        assert "stranger" in await stream.call.details()


async def test_sessions_of_a_verifier_that_left_are_freed(tiny_pair):
    async with running_drafter(tiny_pair[1]) as (address, host):
        async with stream_to(address, host.identity) as first:
            await first.say(opened())
            await first.hear()
        async with stream_to(address, host.identity) as second:
            await second.say(opened("t"))
            await second.hear()
        assert host.num_sessions == 1
