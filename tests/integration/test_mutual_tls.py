"""Mutual TLS over real sockets: the right certificate reaches the next tier, every other one is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from paceline.core.errors import ConfigError, PacelineError, PermissionDeniedError, UnavailableError
from paceline.gateway.fleet.verifier_client import VerifierClient
from paceline.rpc.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2_grpc
from paceline.service.credentials import (
    CLIENT_ROLE_OF,
    DRAFTER,
    GATEWAY,
    PROBE,
    ROLES,
    VERIFIER,
    FleetTls,
    channel,
    only_for,
)
from paceline.service.dev_ca import make_certificates
from paceline.service.process import GrpcServer, start_grpc_server
from paceline.service.status import error_from_rpc
from tests.integration.conftest import know, running_drafter, running_verifier
from tests.integration.test_serving import SERVING, FailingServicer
from tests.integration.test_verifier_service import ask, drafted_tokens
from tools.ports import free_port


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "ours"
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "theirs"
    make_certificates(folder)
    return folder


def tls_of(folder: Path, role: str) -> FleetTls:
    return FleetTls.from_folder(folder / role, role)


@asynccontextmanager
async def serving(folder: Path, role: str, health_port: int = 0) -> AsyncIterator[GrpcServer]:
    """A server of a tier that answers whom it lets in."""
    servicer = FailingServicer(UnavailableError("enough"))

    def add(server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServicer_to_server(servicer, server)
        drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, server)

    server = await start_grpc_server(
        host="127.0.0.1",
        port=0,
        add_servicers=add,
        service_names=["paceline.rpc.v1.Verifier"],
        credentials=tls_of(folder, role).server_credentials(),
        interceptors=[only_for(CLIENT_ROLE_OF[role])],
        health_port=health_port,
    )
    await server.ready()
    try:
        yield server
    finally:
        await server.stop(0)


async def first_answer(server: GrpcServer, tls: FleetTls | None, role: str) -> drafter_pb2.DraftResponse:
    """What the first message of a drafter's stream is; raises what refuses it."""
    async with channel(server.address, tls=tls, role=role) as opened:
        stub: drafter_pb2_grpc.DrafterAsyncStub = drafter_pb2_grpc.DrafterStub(opened)
        for tries_left in (2, 1, 0):
            call = stub.Draft(iter([drafter_pb2.DraftRequest()]), timeout=20)
            try:
                response = await call.read()
                break
            except grpc.aio.AioRpcError as error:
                # gRPC's client loses the status, now and then, of a stream that is refused while it still writes.
                if not tries_left or error.details() != "Internal error from Core":
                    raise error_from_rpc(error) from None
        assert isinstance(response, drafter_pb2.DraftResponse)
        return response


@pytest.mark.parametrize(("role", "client"), [(VERIFIER, GATEWAY), (DRAFTER, VERIFIER)])
async def test_the_tier_in_front_is_let_in(certificates: Path, role: str, client: str) -> None:
    async with serving(certificates, role) as server:
        assert await first_answer(server, tls_of(certificates, client), role) == drafter_pb2.DraftResponse()


@pytest.mark.parametrize("role", [VERIFIER, DRAFTER])
async def test_every_other_role_is_refused_by_name(certificates: Path, role: str) -> None:
    async with serving(certificates, role) as server:
        for client in set(ROLES) - {CLIENT_ROLE_OF[role]}:
            with pytest.raises(PermissionDeniedError, match=rf"is for {client}\.paceline\.internal"):
                await first_answer(server, tls_of(certificates, client), role)


async def test_without_a_certificate_nothing_is_reached(certificates: Path) -> None:
    async with serving(certificates, DRAFTER) as server:
        with pytest.raises(UnavailableError):
            await first_answer(server, None, DRAFTER)
        credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
        named = (("grpc.ssl_target_name_override", "drafter.paceline.internal"),)
        async with grpc.aio.secure_channel(server.address, credentials, options=named) as bare:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health_pb2_grpc.HealthStub(bare).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_of_another_authority_is_refused_by_both_ends(certificates: Path, strangers: Path) -> None:
    ours, theirs = tls_of(certificates, VERIFIER), tls_of(strangers, VERIFIER)
    forged = FleetTls(ca_pem=ours.ca_pem, certificate_pem=theirs.certificate_pem, key_pem=theirs.key_pem)
    async with serving(certificates, DRAFTER) as server:
        for stranger in (theirs, forged):
            with pytest.raises(UnavailableError):
                await first_answer(server, stranger, DRAFTER)


async def test_a_service_of_another_role_cannot_pose_as_a_drafter(certificates: Path) -> None:
    async with serving(certificates, VERIFIER) as server:
        with pytest.raises(UnavailableError):
            await first_answer(server, tls_of(certificates, VERIFIER), DRAFTER)


async def test_any_role_may_ask_for_health_and_only_the_tier_in_front_for_reflection(certificates: Path) -> None:
    async with serving(certificates, DRAFTER) as server:
        async with channel(server.address, tls=tls_of(certificates, PROBE), role=DRAFTER) as opened:
            answer = await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert answer.status == SERVING
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in reflection_pb2_grpc.ServerReflectionStub(opened).ServerReflectionInfo(iter([request])):
                    pass
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_the_health_port_answers_probes_without_a_certificate_and_nothing_else(certificates: Path) -> None:
    port = free_port("127.0.0.1")
    async with serving(certificates, DRAFTER, health_port=port) as server:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as plain:
            stub = health_pb2_grpc.HealthStub(plain)
            request = health_pb2.HealthCheckRequest()
            assert (await stub.Check(request, timeout=20)).status == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                drafter: drafter_pb2_grpc.DrafterAsyncStub = drafter_pb2_grpc.DrafterStub(plain)
                await drafter.Draft(iter([drafter_pb2.DraftRequest()]), timeout=20).read()
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            await server.drain()
            assert (await stub.Check(request, timeout=20)).status != SERVING


async def test_a_health_port_in_use_is_named(certificates: Path) -> None:
    port = free_port("127.0.0.1")
    async with serving(certificates, DRAFTER, health_port=port):
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--health-port"):
            async with serving(certificates, DRAFTER, health_port=port):
                pass


async def test_drafts_cross_both_hops_and_change_no_token(tiny_pair: tuple[Path, Path], certificates: Path) -> None:
    target, draft = tiny_pair
    async with (
        running_verifier(target, tls_dir=certificates) as (calls, verifier),
        running_drafter(draft, tls_dir=certificates) as (address, _),
    ):
        plain = await calls.tokens(ask(max_tokens=100))
        know(verifier, address)
        assert await drafted_tokens(calls) == plain


async def test_a_verifier_with_a_strange_certificate_gets_no_drafts_and_serves_on(
    tiny_pair: tuple[Path, Path], certificates: Path, strangers: Path
) -> None:
    target, draft = tiny_pair
    async with (
        running_verifier(target, tls_dir=strangers) as (calls, verifier),
        running_drafter(draft, tls_dir=certificates) as (address, host),
    ):
        know(verifier, address)
        assert len(await calls.tokens(ask(max_tokens=100))) == 100
        assert host.num_sessions == 0


async def refusal(client: VerifierClient, address: str) -> PacelineError:
    with pytest.raises((PermissionDeniedError, UnavailableError)) as refused:
        await client.run(client.running(address, ask(), 64, lambda *_: False))
    return refused.value


async def test_a_gateway_shows_its_certificate_to_verifiers(certificates: Path, strangers: Path) -> None:
    async with serving(certificates, VERIFIER) as server:
        for folder, role, error in (
            (certificates, GATEWAY, "enough"),
            (certificates, DRAFTER, "is for gateway"),
            (strangers, GATEWAY, "certificate"),
        ):
            client = VerifierClient(20, tls_of(folder, role))
            async with asyncio.timeout(30):
                refused = await refusal(client, server.address)
                while "has lost the reason" in str(refused):
                    # gRPC's client does so now and then.
                    refused = await refusal(client, server.address)
            assert error in str(refused)
            await client.close()
