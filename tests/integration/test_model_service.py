"""A service with a model as the registry sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from paceline import model_service
from paceline.core.messages import DRAFTER, VERIFIER, ModelIdentity
from paceline.drafter.config import DrafterConfig
from paceline.engine.loop import Device
from paceline.model_service import serve_model
from paceline.service.credentials import PROBE, FleetTls, channel
from paceline.service.dev_ca import make_certificates
from paceline.store.base import Replica
from paceline.store.registry import answers_health
from tests.support.memory_store import MemoryStore
from tools.ports import free_port


class IdleHost:
    """A service that has nothing to do."""

    identity = ModelIdentity(name="tiny", vocab_hash="hash", vocab_size=16, context_len=64, eos_token_ids=(1,))
    num_sessions = max_sessions = 0

    @property
    def engine(self) -> IdleHost:
        return self

    device = Device("idle")

    def announced_at(self, address: str) -> None: ...

    def engine_died(self, problem: str) -> None: ...

    async def start(self) -> None: ...

    async def ended(self) -> None:
        await asyncio.Event().wait()

    async def wind_down(self) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def announced_drafter(
    monkeypatch: pytest.MonkeyPatch, announce: str = "", *, tls: FleetTls | None = None, health_port: int = 0
) -> AsyncIterator[Replica]:
    """A drafter without a model; yields what the registry says of it."""
    store = MemoryStore()
    monkeypatch.setattr(model_service, "open_store", lambda url: store)
    config = DrafterConfig(model=Path("unused"), port=0, metrics_port=0, announce=announce, health_port=health_port)
    serving = asyncio.create_task(
        serve_model(
            IdleHost(),
            config,
            role="drafter",
            service_name="paceline.rpc.v1.Drafter",
            add_servicer=lambda server: None,
            registry=CollectorRegistry(),
            tls=tls,
        )
    )
    async with asyncio.timeout(30):
        while not (found := await store.replicas()):  # noqa: ASYNC110 - the store gives no event for it
            await asyncio.sleep(0.01)
    try:
        yield found[0]
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


async def test_a_service_announces_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    async with announced_drafter(monkeypatch) as replica:
        assert await answers_health(replica.address, DRAFTER)
        assert replica.replica_id == f"drafter-{replica.address}"


async def test_a_service_behind_a_proxy_announces_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with announced_drafter(monkeypatch, "drafters.example:8201") as replica:
        assert replica.address == "drafters.example:8201"


async def test_with_certificates_only_the_health_port_is_open_to_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_certificates(tmp_path / "ca")
    own, verifier, probe = (FleetTls.from_folder(tmp_path / "ca" / role, role) for role in (DRAFTER, VERIFIER, PROBE))
    health_port = free_port("127.0.0.1")
    async with announced_drafter(monkeypatch, tls=own, health_port=health_port) as replica:
        assert await answers_health(f"127.0.0.1:{health_port}", DRAFTER)
        assert not await answers_health(replica.address, DRAFTER)
        assert await answers_health(replica.address, DRAFTER, probe)
        assert await services_of(replica.address, verifier) >= {"paceline.rpc.v1.Drafter"}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await services_of(replica.address, probe)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def services_of(address: str, tls: FleetTls) -> set[str]:
    """What a drafter's reflection lists."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with channel(address, tls=tls, role=DRAFTER) as opened:
        call = reflection_pb2_grpc.ServerReflectionStub(opened).ServerReflectionInfo(iter([request]))
        answers = [answer async for answer in call]
    return {service.name for service in answers[0].list_services_response.service}
