"""Statuses of peers, whatever they hold, are errors of ours."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf import any_pb2
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from paceline.core.errors import InvalidRequestError, OverloadedError, PacelineError, PeerLostError, RemoteProtocolError
from paceline.service.status import DETAILS_KEY, MAX_RETRY_AFTER_S, error_from_rpc

EXHAUSTED, INVALID = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT


def status(code: grpc.StatusCode, details: bytes = b"", message: str = "so it is") -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata((DETAILS_KEY, details))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, message)


def rich(*entries: Message | any_pb2.Any) -> bytes:
    whole = status_pb2.Status()
    for entry in entries:
        if isinstance(entry, any_pb2.Any):
            whole.details.append(entry)
        else:
            whole.details.add().Pack(entry)
    return whole.SerializeToString()


def retry(**duration: int) -> bytes:
    return rich(error_details_pb2.RetryInfo(retry_delay=Duration(**duration)))


def no_message_of(kind: type[Message]) -> any_pb2.Any:
    return any_pb2.Any(type_url=f"type.googleapis.com/{kind.DESCRIPTOR.full_name}", value=b"\xff\xff")


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (EXHAUSTED, retry(seconds=2**62)),
        (EXHAUSTED, rich(no_message_of(error_details_pb2.RetryInfo))),
        (INVALID, rich(no_message_of(error_details_pb2.BadRequest))),
        (grpc.StatusCode.UNAVAILABLE, rich(no_message_of(error_details_pb2.ErrorInfo))),
        (grpc.StatusCode.NOT_FOUND, b"\xff\xff\xff"),
    ],
)
def test_a_status_that_cannot_be_read_breaks_the_protocol(code: grpc.StatusCode, details: bytes) -> None:
    """Audit 3, a17: it was a client's 500 instead of a failover."""
    error = error_from_rpc(status(code, details))
    assert isinstance(error, RemoteProtocolError)
    assert str(error).startswith(f"{code.name}: its details cannot be read")


def test_a_stream_whose_status_is_lost_is_lost_itself_so_that_it_is_dialled_anew() -> None:
    error = error_from_rpc(status(grpc.StatusCode.INTERNAL, message="Internal error from Core"))
    assert isinstance(error, PeerLostError)
    assert not isinstance(error_from_rpc(status(grpc.StatusCode.INTERNAL)), PeerLostError)


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [({"seconds": 2, "nanos": 500_000_000}, 2.5), ({"seconds": -9}, 0.0), ({"seconds": 10**9}, MAX_RETRY_AFTER_S)],
)
def test_a_pause_is_as_long_as_asked_for_within_reason(duration: dict[str, int], seconds: float) -> None:
    error = error_from_rpc(status(EXHAUSTED, retry(**duration)))
    assert isinstance(error, OverloadedError)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("SERVER: Received message larger than max (2000 vs. 10)", InvalidRequestError),
        ("CLIENT: Sent message larger than max (2000 vs. 10)", InvalidRequestError),
        ("Stream removed (CLIENT: Received message larger than max (2000 vs. 10))", RemoteProtocolError),
    ],
)
def test_a_message_that_is_too_large_is_the_fault_of_whoever_sent_it(message: str, kind: type[PacelineError]) -> None:
    assert isinstance(error_from_rpc(status(EXHAUSTED, message=message)), kind)
