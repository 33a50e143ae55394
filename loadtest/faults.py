"""What can go wrong in a fleet of processes, as things that are done to it one after another; seeded, so repeatable.

A fault names its tier and what was done; whatever it stops it starts again by itself.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from loadtest.proxy import DelayProxy
from paceline.cluster.local import LocalFleet
from paceline.core.errors import UnavailableError
from paceline.store.base import Store

KILL = "kill"
VALKEY = "valkey"
# How long a frozen process stands, a mark to drain lasts, a network is bad, in seconds.
LASTS_S = 3.0
# Longer than entries live in the registry, so that a frozen replica is taken for dead and comes back.
FREEZE_S = (1.0, 7.0)
SLOW_ROUND_TRIP_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing done to one process, at `time.perf_counter` seconds."""

    kind: str
    role: str
    name: str
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What faults are done to.

    Attributes:
        fleet: Running processes.
        store: The fleet's own, for marks to drain.
        proxies: By the name of the replica behind each.
    """

    fleet: LocalFleet
    store: Store
    proxies: Mapping[str, DelayProxy]


async def _kill(site: Site, name: str, chance: random.Random) -> None:
    del chance
    site.fleet.kill(name)


async def _restart(site: Site, name: str, chance: random.Random) -> None:
    """As a rolling restart does it."""
    del chance
    site.fleet.terminate(name)


async def _freeze(site: Site, name: str, chance: random.Random) -> None:
    site.fleet.pause(name)
    try:
        await asyncio.sleep(chance.uniform(*FREEZE_S))
    finally:
        site.fleet.resume(name)


async def _drain(site: Site, name: str, chance: random.Random) -> None:
    del chance
    # A store that is away has no marks; the fault does not happen then.
    with suppress(UnavailableError):
        await site.store.drain(name)
        await asyncio.sleep(LASTS_S)
        await site.store.drain(name, draining=False)


async def _cut(site: Site, name: str, chance: random.Random) -> None:
    del chance
    site.proxies[name].cut()


async def _half_open(site: Site, name: str, chance: random.Random) -> None:
    """Nothing passes, and nobody is told."""
    del chance
    with site.proxies[name].held():
        await asyncio.sleep(LASTS_S)


async def _slow(site: Site, name: str, chance: random.Random) -> None:
    del chance
    proxy = site.proxies[name]
    proxy.set_round_trip(SLOW_ROUND_TRIP_S)
    try:
        await asyncio.sleep(LASTS_S)
    finally:
        proxy.set_round_trip(0.0)


_SERVICES = ("verifier", "drafter", "gateway")
_BEHIND_PROXIES = ("verifier", "drafter")
# What is done, to which roles.
FAULTS: dict[str, tuple[Callable[..., object], tuple[str, ...]]] = {
    KILL: (_kill, (*_SERVICES, VALKEY)),
    "restart": (_restart, _SERVICES),
    "freeze": (_freeze, (*_SERVICES, VALKEY)),
    "drain": (_drain, _SERVICES),
    "cut": (_cut, _BEHIND_PROXIES),
    "half-open": (_half_open, _BEHIND_PROXIES),
    "slow": (_slow, _BEHIND_PROXIES),
}


def planned(kinds: Sequence[str], names: Mapping[str, Sequence[str]], chance: random.Random) -> Iterator[Fault]:
    """Yields faults for ever: every second one a kill if kills are asked for, tiers and replicas in turn.

    Args:
        kinds: Of `FAULTS`.
        names: Processes by role.
        chance: Draws kinds.
    """
    turns = dict.fromkeys(names, 0)
    others = [kind for kind in kinds if kind != KILL]
    at = dict.fromkeys(FAULTS, 0)
    while True:
        for kind in [KILL] * (KILL in kinds) + ([chance.choice(others)] if others else []):
            roles = [role for role in FAULTS[kind][1] if names.get(role)]
            role = roles[at[kind] % len(roles)]
            at[kind] += 1
            name = names[role][turns[role] % len(names[role])]
            turns[role] += 1
            yield Fault(kind=kind, role=role, name=name)


class Disturbance:
    """Does faults to a fleet while a block runs, one every so many seconds; what they stopped runs again afterwards."""

    def __init__(self, site: Site, plan: Iterator[Fault], chance: random.Random) -> None:
        self.done: list[Fault] = []
        self._site = site
        self._plan = plan
        self._chance = chance
        self._under_way: set[asyncio.Task[None]] = set()
        self._busy: set[str] = set()

    async def go_on(self, every_s: float, seconds: float, on_fault: Callable[[Fault], None]) -> None:
        """Does a fault every `every_s` seconds for so many seconds, then waits until the last one is over."""
        ends_s = time.perf_counter() + seconds
        while time.perf_counter() + every_s <= ends_s:
            await asyncio.sleep(every_s)
            fault = next(fault for fault in self._plan if fault.name not in self._busy)
            self._begin(fault, on_fault)
        await asyncio.gather(*self._under_way)

    def _begin(self, fault: Fault, on_fault: Callable[[Fault], None]) -> None:
        begun = Fault(kind=fault.kind, role=fault.role, name=fault.name, at_s=time.perf_counter())
        self.done.append(begun)
        on_fault(begun)
        task = asyncio.create_task(self._do(begun))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _do(self, fault: Fault) -> None:
        self._busy.add(fault.name)
        try:
            await FAULTS[fault.kind][0](self._site, fault.name, self._chance)  # type: ignore[misc]  # all are coroutines
        finally:
            self._busy.discard(fault.name)
