"""Real gRPC servers on loopback ports: health, status codes, ports in use, signals."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.core.errors import (
    ConfigError,
    EndsEnginesError,
    EngineDiedError,
    InvalidRequestError,
    LocalProtocolError,
    ModelNotFoundError,
    OverloadedError,
    PacelineError,
    PeerLostError,
    PermissionDeniedError,
    RemoteProtocolError,
    ResumeMismatchError,
    SessionNotFoundError,
    UnauthenticatedError,
    UnavailableError,
)
from paceline.rpc.v1 import (
    drafter_pb2,
    drafter_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from paceline.service.outbox import sending
from paceline.service.process import (
    CHANNEL_OPTIONS,
    GrpcServer,
    install_signal_handlers,
    run,
    start_grpc_server,
)
from paceline.service.status import NOT_SERVED, error_from_rpc
from paceline.wire.common import PROTOCOL

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
VERIFIER = "paceline.rpc.v1.Verifier"


class FailingServicer(
    verifier_pb2_grpc.VerifierServicer, drafter_pb2_grpc.DrafterServicer, gateway_pb2_grpc.GatewayServicer
):
    """Answers once, then fails with the error it was given, on all three kinds of call."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended = asyncio.Event()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[gateway_pb2.GatewayGenerateResponse]:
        try:
            yield gateway_pb2.GatewayGenerateResponse(token_ids=[1])
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def Verify(self, request_iterator: Any, context: Any) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        yield verifier_pb2.VerifyResponse(protocol=PROTOCOL)
        if self.error is not None:
            raise self.error

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[drafter_pb2.DraftResponse]:
        async for _ in request_iterator:
            yield drafter_pb2.DraftResponse()
            if self.error is not None:
                raise self.error

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        if self.error is not None:
            raise self.error
        return gateway_pb2.ListModelsResponse()


@asynccontextmanager
async def running(servicer: FailingServicer) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    def add(server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServicer_to_server(servicer, server)
        drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, server)
        gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, server)

    server = await start_grpc_server(
        host="127.0.0.1", port=0, add_servicers=add, service_names=[VERIFIER, "paceline.rpc.v1.Drafter"]
    )
    try:
        async with grpc.aio.insecure_channel(server.address, options=CHANNEL_OPTIONS) as channel:
            yield server, channel
    finally:
        await server.stop(0)


async def unary_stream_error(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    call = gateway_pb2_grpc.GatewayStub(channel).Generate(gateway_pb2.GatewayGenerateRequest(), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in call:
            assert response.token_ids == [1]
    return caught.value


async def stream_stream_error(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    call = drafter_pb2_grpc.DrafterStub(channel).Draft(iter([drafter_pb2.DraftRequest()]), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value


async def unary_unary_error(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway_pb2_grpc.GatewayStub(channel).ListModels(gateway_pb2.ListModelsRequest(), timeout=30)
    return caught.value


CALLS = [unary_stream_error, stream_stream_error, unary_unary_error]
ERRORS: list[tuple[PacelineError, grpc.StatusCode]] = [
    (InvalidRequestError("top_p", "must be above 0, got 0.0"), grpc.StatusCode.INVALID_ARGUMENT),
    (RemoteProtocolError("gap of 3 tokens"), grpc.StatusCode.INVALID_ARGUMENT),
    (ModelNotFoundError("model 'x' is not served here"), grpc.StatusCode.NOT_FOUND),
    (OverloadedError("queue is full", retry_after_s=2.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (UnavailableError("no verifier"), grpc.StatusCode.UNAVAILABLE),
    (ConfigError("drafter for another vocabulary"), grpc.StatusCode.FAILED_PRECONDITION),
    (EngineDiedError("the engine died"), grpc.StatusCode.UNAVAILABLE),
    (EndsEnginesError("two engines died of it"), grpc.StatusCode.FAILED_PRECONDITION),
    (ResumeMismatchError("digest: of other tokens"), grpc.StatusCode.FAILED_PRECONDITION),
    (SessionNotFoundError("session_id: not known"), grpc.StatusCode.NOT_FOUND),
    (UnauthenticatedError("the API key is not known here"), grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDeniedError("this call is for gateways"), grpc.StatusCode.PERMISSION_DENIED),
]


async def test_an_error_crosses_the_wire_as_its_type_on_every_kind_of_call() -> None:
    servicer = FailingServicer()
    async with running(servicer) as (_, channel):
        for (error, code), call in itertools.product(ERRORS, CALLS):
            servicer.error = error
            status = await call(channel)
            received = error_from_rpc(status)
            assert (status.code(), type(received), str(received)) == (code, type(error), str(error))
            assert vars(received) == vars(error)


async def test_an_unknown_error_is_internal_and_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    servicer = FailingServicer()
    async with running(servicer) as (_, channel):
        for error, call in itertools.product((KeyError("secret"), LocalProtocolError("secret")), CALLS):
            servicer.error = error
            caplog.clear()
            status = await call(channel)
            assert status.code() is grpc.StatusCode.INTERNAL
            assert "secret" not in (status.details() or "")
            assert type(error_from_rpc(status)) is PacelineError
            assert "secret" in caplog.text


async def test_a_stream_that_the_peer_refuses_leaves_nothing_for_the_garbage_collector(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A verifier that refused its stream made the gateway log "Task was destroyed but it is pending!"."""

    async def messages() -> AsyncIterator[verifier_pb2.VerifyRequest]:
        yield verifier_pb2.VerifyRequest(protocol=PROTOCOL)
        await asyncio.Event().wait()

    async with running(FailingServicer(PermissionDeniedError("this call is for gateways"))) as (_, channel):
        for _ in range(20):
            call = verifier_pb2_grpc.VerifierStub(channel).Verify()
            with pytest.raises(grpc.aio.AioRpcError):
                async with sending(call, messages()):
                    while True:
                        await call.read()
    gc.collect()
    await asyncio.sleep(0)
    assert [each.getMessage() for each in caplog.records if each.name == "asyncio"] == []


async def test_a_cancelled_call_ends_its_handler() -> None:
    servicer = FailingServicer()
    async with running(servicer) as (_, channel):
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(gateway_pb2.GatewayGenerateRequest())
        assert (await call.read()).token_ids == [1]
        call.cancel()
        await asyncio.wait_for(servicer.ended.wait(), 30)


async def test_an_unreachable_server_is_unavailable() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        assert type(error_from_rpc(await unary_unary_error(channel))) is PeerLostError


async def test_a_message_above_the_limit_is_no_overload() -> None:
    async with running(FailingServicer()) as (_, channel):
        request = gateway_pb2.GatewayGenerateRequest(prompt="x" * (17 * 1024 * 1024))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=30).read()
    assert type(error_from_rpc(caught.value)) is InvalidRequestError


async def test_health_serves_only_between_ready_and_drain() -> None:
    async with running(FailingServicer()) as (server, channel):
        stub = health_pb2_grpc.HealthStub(channel)

        async def statuses() -> set[int]:
            answers = [await stub.Check(health_pb2.HealthCheckRequest(service=name)) for name in ("", VERIFIER)]
            return {answer.status for answer in answers}

        assert await statuses() == {NOT_SERVING}
        await server.ready()
        assert await statuses() == {SERVING}
        await server.not_ready()
        assert await statuses() == {NOT_SERVING}
        await server.ready()
        await server.drain()
        await server.ready()
        assert await statuses() == {NOT_SERVING}


async def test_a_method_that_a_servicer_lacks_is_unimplemented(caplog: pytest.LogCaptureFixture) -> None:
    async def missing(_request: Any, _context: Any) -> None:
        raise NotImplementedError(NOT_SERVED)

    servicer = FailingServicer()
    servicer.ListModels = missing  # type: ignore[assignment,method-assign]
    async with running(servicer) as (_, channel):
        assert (await unary_unary_error(channel)).code() is grpc.StatusCode.UNIMPLEMENTED
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_reflection_lists_the_services() -> None:
    async with running(FailingServicer()) as (_, channel):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = stub.ServerReflectionInfo(iter([request]))
        answers = [answer async for answer in call]
    names = {service.name for service in answers[0].list_services_response.service}
    assert names >= {VERIFIER, "paceline.rpc.v1.Drafter", "grpc.health.v1.Health"}


async def test_a_port_in_use_is_named_with_the_way_out() -> None:
    async with running(FailingServicer()) as (server, _):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            for port in (server.port, taken.getsockname()[1]):
                with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: the port is in use.*--port"):
                    await start_grpc_server(host="127.0.0.1", port=port, add_servicers=lambda _: None, service_names=[])


async def test_sigterm_sets_the_stop_event() -> None:
    stop_event = asyncio.Event()
    install_signal_handlers(stop_event)
    loop = asyncio.get_running_loop()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(stop_event.wait(), 30)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@pytest.mark.parametrize(("error", "status"), [(ConfigError("no model"), 2), (UnavailableError("no redis"), 1)])
def test_run_ends_with_one_line_and_a_status(
    error: PacelineError, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> None:
        raise error

    with pytest.raises(SystemExit) as ended:
        run(main(), prog="paceline-x")
    assert ended.value.code == status
    assert capsys.readouterr().err == f"paceline-x: error: {error}\n"


def test_run_returns_the_result_of_its_coroutine() -> None:
    async def answer() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(answer()).startswith("uvloop")
