"""An error keeps its class on each way to a client: a subclass arrives as the nearest one that the other end knows."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import pytest

from paceline import wire
from paceline.core import errors, processors
from paceline.core.errors import (
    InvalidRequestError,
    LocalProtocolError,
    OverloadedError,
    PacelineError,
    PeerLostError,
    UnavailableError,
)
from paceline.core.messages import GenerateRequest, StepCommit
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.http.errors import to_http
from paceline.gateway.text import chat_template
from paceline.rpc.v1 import verifier_pb2
from paceline.service.status import ErrorInterceptor, error_from_rpc

# Modules with subclasses of their own.
ELSEWHERE = (processors, chat_template)
REQUEST = GenerateRequest(
    session_id="s",
    epoch=1,
    prompt_token_ids=(1,),
    sampling=SamplingParams(max_tokens=9),
    speculation=SpeculationParams(),
)


def all_kinds(kind: type[PacelineError] = PacelineError) -> Iterator[type[PacelineError]]:
    yield kind
    for each in kind.__subclasses__():
        if each.__module__.startswith("paceline."):
            yield from all_kinds(each)


KINDS = sorted({*all_kinds()}, key=lambda kind: kind.__name__)


def made(kind: type[PacelineError]) -> PacelineError:
    if issubclass(kind, InvalidRequestError):
        named = len(inspect.signature(kind).parameters) == 2
        return kind("top_p", "must be above 0") if named else kind("must be above 0")  # type: ignore[call-arg]
    return kind("so it is", retry_after_s=2.5) if issubclass(kind, OverloadedError) else kind("so it is")


def nearest(kind: type[PacelineError]) -> type[PacelineError]:
    """The class that other processes know; who lost a peer is not lost itself."""
    known = next(each for each in kind.__mro__ if each.__module__ == errors.__name__)
    return UnavailableError if issubclass(known, PeerLostError) else known


def over_the_stream_of_sessions(error: PacelineError) -> PacelineError:
    message = wire.log_to_pb(wire.LogPart(commit=StepCommit(errors={1: error}))).SerializeToString()
    asked = {1: wire.AskedSession(request=REQUEST, vocab_size=10)}
    part = wire.log_from_pb(verifier_pb2.VerifyResponse.FromString(message), asked, last_number=1)
    [(*_, arrived)] = part
    assert isinstance(arrived, PacelineError)
    return arrived


class Context:
    """Of a gRPC call that ends with a status."""

    async def abort(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> NoReturn:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


def as_a_status(error: PacelineError) -> PacelineError:
    async def fail(request: Any, context: Any) -> NoReturn:
        raise error

    handler = ErrorInterceptor().wrap(grpc.unary_unary_rpc_method_handler(fail), "/a/method")
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        asyncio.run(handler.unary_unary(None, Context()))
    return error_from_rpc(ended.value)


def test_subclasses_of_all_modules_are_tried() -> None:
    found = {kind.__module__ for kind in KINDS}
    assert {errors.__name__, *(each.__name__ for each in ELSEWHERE)} <= found


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_session_keeps_its_class_between_verifier_and_gateway(kind: type[PacelineError]) -> None:
    """Audit 4, b10: a bad request came back as a fault of the verifier, and was tried at all of them."""
    sent = made(kind)
    arrived = over_the_stream_of_sessions(sent)
    assert type(arrived) is nearest(kind)
    assert (str(arrived), vars(arrived).items() <= vars(sent).items()) == (str(sent), True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_a_call_keeps_its_class_in_the_status(kind: type[PacelineError]) -> None:
    sent = made(kind)
    arrived = as_a_status(sent)
    # A fault of our own is internal, and its cause stays in the log.
    internal = nearest(kind) in (PacelineError, LocalProtocolError)
    assert type(arrived) is (PacelineError if internal else nearest(kind))
    assert internal or (str(arrived), vars(arrived).items() <= vars(sent).items()) == (str(sent), True)


@pytest.mark.parametrize("kind", [each for each in KINDS if each.__module__ == errors.__name__])
def test_a_client_sees_the_same_status_wherever_an_error_was_raised(kind: type[PacelineError]) -> None:
    sent = made(kind)
    assert (
        to_http(over_the_stream_of_sessions(sent)).status == to_http(as_a_status(sent)).status == to_http(sent).status
    )
