"""Every gRPC servicer under arbitrary messages and bytes: the right status, nothing left over, and it still serves."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import strategies as st

from paceline.core.errors import MAX_PROBLEM_CHARS, InvalidRequestError
from paceline.core.messages import ModelIdentity
from paceline.rpc.v1 import drafter_pb2, gateway_pb2, verifier_pb2
from paceline.service.process import MAX_MESSAGE_BYTES
from paceline.wire import draft_request_to_pb, start_session_to_pb
from paceline.wire.common import PROTOCOL
from tests.integration.conftest import running_drafter, verifier_at
from tests.integration.test_drafter_service import committed, opened, stream_to
from tests.integration.test_verifier_service import ask, told
from tests.support.fuzzing import holds_for_all, mangled, messages, status_of, status_of_stream, until
from tests.support.log_stream import verifier_calls
from tests.support.scripted_fleet import MODEL, scripted_fleet

GATEWAY = "/paceline.rpc.v1.Gateway/Generate"
LIST_MODELS = "/paceline.rpc.v1.Gateway/ListModels"
VERIFIER = "/paceline.rpc.v1.Verifier/Verify"
DRAFTER = "/paceline.rpc.v1.Drafter/Draft"
OK = grpc.StatusCode.OK
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
# A stream whose verifier has said all without a fault ends so.
LEFT = grpc.StatusCode.UNAVAILABLE

SESSIONS = st.sampled_from(("s", "t", "", "x" * 300))
EPOCHS = st.sampled_from((0, 1, 2, 2**64 - 1))
OURS = {"session_id": SESSIONS, "epoch": EPOCHS}
TEXTS = {"model": st.sampled_from(("", MODEL, "x" * 5000)), "prompt": st.text(max_size=20)}


def either(kind, overrides, good: Message | None = None) -> st.SearchStrategy[bytes]:
    """Messages of the right type with anything in them, also over a good one, and bytes that are none."""
    anything = messages(kind, overrides).map(lambda message: message.SerializeToString())
    # A later value of a field wins, so this is the good message with some fields changed.
    start = b"" if good is None else good.SerializeToString()
    return st.one_of(anything, anything.map(lambda data: start + data), mangled(kind, overrides))


@pytest.mark.full
async def test_the_gateway_answers_any_message_with_a_status_that_blames_it(tmp_path: Path) -> None:
    async with scripted_fleet(tmp_path) as fleet, grpc.aio.insecure_channel(fleet.addresses.grpc) as channel:
        good = gateway_pb2.GatewayGenerateRequest(prompt="x")

        async def answered(data: bytes) -> None:
            status, details = await status_of(channel, GATEWAY, data)
            assert status in (OK, INVALID, NOT_FOUND), details
            assert (await status_of(channel, LIST_MODELS, data))[0] in (OK, INVALID)

        await holds_for_all(either(gateway_pb2.GatewayGenerateRequest, TEXTS, good), answered, 300)
        assert (await fleet.http.get("/health")).json()["sessions"] == 0
        assert (await status_of(channel, GATEWAY, good.SerializeToString()))[0] is OK


def asked() -> st.SearchStrategy[list[bytes]]:
    """What gateways may say over a stream, by the book or not."""
    good = verifier_pb2.VerifyRequest(starts=[start_session_to_pb(1, ask())])
    anything = either(verifier_pb2.VerifyRequest, OURS, good)
    hello = verifier_pb2.VerifyRequest(protocol=PROTOCOL).SerializeToString()
    first = st.one_of(st.just(hello), st.just(hello), anything)
    return st.tuples(first, st.lists(anything, max_size=6)).map(lambda drawn: [drawn[0], *drawn[1]])


@pytest.mark.full
async def test_the_verifier_ends_any_stream_with_a_status_that_blames_it_and_frees_all_its_sessions(tiny_pair) -> None:
    async with verifier_at(tiny_pair[0]) as (address, host), verifier_calls(address, 256) as calls:
        plain = await calls.tokens(ask())

        async def ended(sent: list[bytes]) -> None:
            status, details = await status_of_stream(address, VERIFIER, sent)
            assert status in (OK, INVALID), details

        await holds_for_all(asked(), ended, 300)
        await until(lambda: host.num_sessions == 0)
        assert await calls.tokens(ask()) == plain


def requests(identity: ModelIdentity) -> st.SearchStrategy[list[bytes]]:
    """What verifiers may say over a stream, by the book or not."""
    anything = either(drafter_pb2.DraftRequest, OURS)
    hello = draft_request_to_pb((), target=identity)
    sane = st.sampled_from(
        [
            draft_request_to_pb([opened("s")]),
            draft_request_to_pb([opened("s", epoch=2, length=300, room=2**32 - 1)]),
            draft_request_to_pb([committed(token_ids=(1, 2, 3))]),
            draft_request_to_pb([committed(base_len=2**32 - 1)]),
            draft_request_to_pb([committed(2**32 - 1)]),
            draft_request_to_pb([committed(token_ids=(2**32 - 1,))]),
            hello,
        ]
    ).map(lambda message: message.SerializeToString())
    first = st.one_of(st.just(hello.SerializeToString()), anything)
    return st.tuples(first, st.lists(st.one_of(sane, anything), max_size=8)).map(lambda drawn: [drawn[0], *drawn[1]])


@pytest.mark.full
async def test_the_drafter_ends_any_stream_with_a_status_that_blames_it_and_frees_all_its_sessions(tiny_pair) -> None:
    async with running_drafter(tiny_pair[1]) as (address, host):

        async def ended(sent: list[bytes]) -> None:
            status, details = await status_of_stream(address, DRAFTER, sent)
            assert status in (INVALID, LEFT, grpc.StatusCode.FAILED_PRECONDITION), details
            assert status is not LEFT or "ended its side" in details

        await holds_for_all(requests(host.identity), ended, 300)
        await until(lambda: host.num_sessions == 0)
        async with stream_to(address, host.identity) as stream:
            await stream.say(opened())
            assert await stream.hear()


@pytest.mark.parametrize("method", [GATEWAY, LIST_MODELS])
async def test_the_gateway_calls_broken_bytes_by_their_name(tmp_path: Path, method: str) -> None:
    async with scripted_fleet(tmp_path) as fleet, grpc.aio.insecure_channel(fleet.addresses.grpc) as channel:
        status, details = await status_of(channel, method, b"\xff\xff\xff")
        assert status is INVALID
        assert details.startswith("request: is not a message of this method")


async def test_broken_bytes_in_the_middle_of_a_stream_end_it_and_free_its_sessions(tiny_pair) -> None:
    async with running_drafter(tiny_pair[1]) as (address, host):
        sent = [draft_request_to_pb((), target=host.identity), draft_request_to_pb([opened()])]
        data = [*(message.SerializeToString() for message in sent), b"\xff\xff"]
        status, details = await status_of_stream(address, DRAFTER, data)
        assert status is INVALID
        assert details.startswith("request: is not a message of this method")
        await until(lambda: host.num_sessions == 0)


async def test_a_message_beyond_the_limit_of_bytes_is_refused_and_the_next_one_served(tiny_pair) -> None:
    async with verifier_at(tiny_pair[0]) as (address, host), verifier_calls(address, 256) as calls:
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            status, _ = await status_of(channel, VERIFIER, bytes(MAX_MESSAGE_BYTES + 1))
            assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(InvalidRequestError, match=r"request: has \d+ bytes, at most \d+ are allowed"):
            await calls.tokens(ask("x" * MAX_MESSAGE_BYTES))
        assert len(await calls.tokens(ask())) == 24
        assert host.num_sessions == 0


async def test_long_values_are_shortened_in_what_is_told_of_them(tiny_pair) -> None:
    async with verifier_at(tiny_pair[0]) as (address, _), told(address) as stream:
        message = start_session_to_pb(1, ask())
        message.params.speculation.acceptance = "\N{GRINNING FACE}" * 100_000
        await stream.say(starts=[message])
        error = (await stream.hear_of(1, "errors")).errors[0]
    assert (error.kind, error.field) == ("InvalidRequestError", "speculation.acceptance")
    assert error.problem.startswith("must be one of")
    assert len(error.problem) <= MAX_PROBLEM_CHARS
