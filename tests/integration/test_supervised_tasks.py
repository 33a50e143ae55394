"""Background tasks of real services go on after what should never happen, and health tells of it meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline import model_service
from paceline.service import supervision
from paceline.store.base import Replica
from tests.integration.test_model_service import announced_drafter
from tests.support.memory_store import MemoryStore
from tests.support.scripted_fleet import ScriptedFleet, scripted_fleet


async def health_of(fleet: ScriptedFleet, **wanted: object) -> dict[str, object]:
    """Health, once it says what is wanted."""
    async with asyncio.timeout(30):
        while True:
            answer = await fleet.http.get("/health")
            health: dict[str, object] = answer.json()
            if wanted.items() <= health.items():
                assert answer.status_code == 200
                return health


async def test_a_gateway_whose_view_of_the_fleet_broke_says_so_and_follows_the_fleet_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_fleet(tmp_path) as fleet:
        await health_of(fleet, status="ok", tasks="ok")
        read = fleet.store.replicas

        async def broken(role: str | None = None) -> list[Replica]:
            raise TypeError("unhashable type: 'list'")

        monkeypatch.setattr(fleet.store, "replicas", broken)
        await health_of(fleet, status="degraded", tasks="fleet", verifiers=1)
        monkeypatch.setattr(supervision, "SETTLED_S", 0.0)
        monkeypatch.setattr(fleet.store, "replicas", read)
        await fleet.announce(Replica(replica_id="late", role="drafter", address="127.0.0.1:1"))
        await health_of(fleet, status="ok", tasks="ok", drafters=1)
        metrics = (await fleet.http.get("/metrics")).text
        [line] = [
            each for each in metrics.splitlines() if each.startswith('paceline:task_restarts_total{task="fleet"}')
        ]
        assert float(line.split()[-1]) >= 1


async def test_a_service_whose_heartbeat_broke_is_announced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.store.registry.HEARTBEAT_S", 0.01)
    announce, broke = MemoryStore.announce, asyncio.Event()

    async def broken(self: MemoryStore, replica: Replica, ttl_s: float, *, marked: bool = False) -> bool:
        broke.set()
        self._replicas.clear()
        raise TypeError("not what a store raises")

    async with announced_drafter(monkeypatch) as replica:
        store = model_service.open_store("memory://")
        monkeypatch.setattr(MemoryStore, "announce", broken)
        await broke.wait()
        assert await store.replicas() == []
        monkeypatch.setattr(MemoryStore, "announce", announce)
        async with asyncio.timeout(30):
            while await store.replicas() != [replica]:  # noqa: ASYNC110 - the store gives no event for it
                await asyncio.sleep(0.01)
