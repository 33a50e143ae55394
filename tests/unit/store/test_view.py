"""A replica that vanishes from the registry is kept while it answers, and no longer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from paceline.core.errors import UnavailableError
from paceline.store.base import Replica
from paceline.store.registry import RegistryView

A, B, C = (Replica(replica_id=name, role="verifier", address=f"{name}:1") for name in ("a", "b", "c"))


class Fleet:
    """A registry and the replicas themselves, in the test's hands."""

    def __init__(self, *replicas: Replica) -> None:
        self.announced: list[Replica] | None = list(replicas)
        self.serving = {each.replica_id for each in replicas}
        self.asked: list[str] = []
        self.view = RegistryView(self, answers=self.answers)

    async def replicas(self, role: str | None = None) -> list[Replica]:
        if self.announced is None:
            raise UnavailableError("no answer")
        return self.announced

    async def answers(self, replica: Replica) -> bool:
        self.asked.append(replica.replica_id)
        return replica.replica_id in self.serving

    async def known(self) -> list[str]:
        await self.view.refresh()
        return [each.replica_id for each in self.view.replicas]


async def test_a_fleet_that_vanishes_at_once_is_kept_while_it_serves_and_only_the_missing_are_asked() -> None:
    fleet = Fleet(A, B, C)
    assert await fleet.known() == ["a", "b", "c"]
    assert not fleet.asked
    fleet.announced = [B]
    assert await fleet.known() == ["a", "b", "c"]
    assert fleet.asked == ["a", "c"]
    fleet.announced = []
    for _ in range(10):
        assert await fleet.known() == ["a", "b", "c"]
    fleet.serving.discard("c")
    assert await fleet.known() == ["a", "b"]


async def test_a_replica_that_stops_is_forgotten_at_once() -> None:
    fleet = Fleet(A, B)
    await fleet.known()
    fleet.announced, fleet.serving = [B], {"b"}
    assert await fleet.known() == ["b"]
    fleet.serving = {"a", "b"}
    assert await fleet.known() == ["b"]


async def test_what_a_replica_last_said_holds_while_it_is_kept_and_news_replace_it() -> None:
    fleet = Fleet(replace(A, draining=True))
    await fleet.known()
    fleet.announced = []
    await fleet.known()
    assert fleet.view.replicas == (replace(A, draining=True),)
    fleet.announced = [replace(A, num_sessions=3)]
    await fleet.known()
    assert fleet.view.replicas == (replace(A, num_sessions=3),)


async def test_an_address_that_another_replica_announces_is_that_one_s() -> None:
    fleet = Fleet(A)
    await fleet.known()
    fleet.announced = [replace(B, address=A.address)]
    assert await fleet.known() == ["b"]
    assert not fleet.asked


async def test_all_missing_replicas_are_asked_at_once() -> None:
    waiting, all_asked = 0, asyncio.Event()

    async def answers(replica: Replica) -> bool:
        nonlocal waiting
        waiting += 1
        if waiting == 3:
            all_asked.set()
        await all_asked.wait()
        return True

    fleet = Fleet(A, B, C)
    view = RegistryView(fleet, answers=answers)
    await view.refresh()
    fleet.announced = []
    async with asyncio.timeout(30):
        await view.refresh()
    assert view.replicas == (A, B, C)


async def test_while_the_registry_is_away_nobody_is_asked_and_nobody_goes() -> None:
    fleet = Fleet(A, B)
    await fleet.known()
    fleet.announced, fleet.serving = None, set()
    assert await fleet.known() == ["a", "b"]
    assert not fleet.asked
    fleet.announced = [B]
    assert await fleet.known() == ["b"]
