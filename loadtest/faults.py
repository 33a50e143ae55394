"""Faults in a fleet of processes, one after another; seeded, so repeatable.

A fault names its tier and what was done; whatever it stops it starts again by itself. Faults inside a process are
ordered from services that can go wrong (`loadtest.faulty`).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from redis.exceptions import RedisError

from loadtest.faulty import orders
from loadtest.histories import History
from loadtest.key_faults import KeyFile, Withdrawn
from loadtest.steadfast import over, run_one
from loadtest.store_faults import fail_over, fill, make_read_only
from paceline.client.resuming import ResumingClient
from paceline.cluster.local import LocalFleet
from paceline.core.errors import EndsEnginesError, UnavailableError
from paceline.rpc.v1 import common_pb2, gateway_pb2
from paceline.store.base import Store
from tools.delay_proxy import DelayProxy

KILL = "kill"
VALKEY = "valkey"
# Not a process: who sends poisonous requests, one at a time.
POISONER = "poisoner"
# Nor is the file of API keys.
KEY_FILE = "key file"
WRONG_ANSWERS = (orders.INTERNAL, orders.GARBAGE, orders.NONSENSE, orders.GAP, orders.HALF)
# Seconds that a mark to drain lasts, or a bad network, or what was ordered.
LASTS_S = 3.0
# Longer than entries live in the registry, so that a frozen replica is taken for dead and comes back.
FREEZE_S = (1.0, 7.0)
SLOW_ROUND_TRIP_S = 0.1
# A store that is slow takes most of the time that its clients allow.
SLOW_STORE_S = 0.8
# Connections without a request, at each door of a gateway.
NUM_IDLE_CONNECTIONS = 800
WELL_WITHIN_S = 60.0
POLL_S = 0.2
# A poisonous request is tried that long.
POISON_PATIENCE_S = 120.0
# Engines that may die of one before it is refused.
MOST_ENGINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of a process, at `time.perf_counter` seconds."""

    kind: str
    role: str
    name: str
    at_s: float = 0.0

    def num_verifiers_needed(self, num_verifiers: int) -> int:
        """How many of the verifiers must be there when it begins.

        The test is of going on, not of standing still; and a session that meets one dead engine after another without
        a token is rightly taken for the cause.
        """
        if self.role == POISONER or self.kind == orders.HANG:
            return num_verifiers
        if self.role == "verifier" and self.kind in (KILL, "restart", *WRONG_ANSWERS):
            return min(2, num_verifiers)
        return 0

    @property
    def hides_deaths(self) -> bool:
        """Whether nobody may learn that an engine died of a poisonous request.

        Records of sessions may be lost, or a gateway leaves a verifier for its wrong answers while the engine goes on.
        """
        forgets = self.role in (VALKEY, "gateway") and self.kind in (KILL, "restart", "failed-over")
        return forgets or self.kind in WRONG_ANSWERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Poisoned:
    """Outcome of a poisonous request.

    Attributes:
        kind: How engines die of it.
        history: History of its client.
        num_engines: How many engines died of it.
    """

    kind: str
    history: History
    num_engines: int

    @property
    def contained(self) -> bool:
        """Whether its client learned that it ends engines, before it had ended more than it may."""
        refused = self.history.error.startswith(EndsEnginesError.__name__)
        return refused and self.num_engines <= MOST_ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The fleet that faults are done to.

    Attributes:
        fleet: Running processes.
        store: The fleet's own, for marks to drain.
        proxies: By the name of the replica behind each.
        keys: Keys of the gateways' clients.
        orders: Folder through which services are ordered to go wrong.
        chance: Draws what a fault leaves open.
        poisoned: Poisonous requests so far.
        withdrawn: Keys that were withdrawn so far.
    """

    fleet: LocalFleet
    store: Store
    proxies: Mapping[str, DelayProxy]
    keys: KeyFile
    orders: Path
    chance: random.Random
    poisoned: list[Poisoned] = field(default_factory=list)
    withdrawn: list[Withdrawn] = field(default_factory=list)


async def _kill(site: Site, name: str) -> None:
    site.fleet.kill(name)


async def _restart(site: Site, name: str) -> None:
    """As a rolling restart does it."""
    site.fleet.terminate(name)


async def _freeze(site: Site, name: str) -> None:
    site.fleet.pause(name)
    try:
        await asyncio.sleep(site.chance.uniform(*FREEZE_S))
    finally:
        site.fleet.resume(name)


async def _drain(site: Site, name: str) -> None:
    # A store that is away has no marks; the fault does not happen then.
    with suppress(UnavailableError):
        await site.store.drain(name)
        await asyncio.sleep(LASTS_S)
        await site.store.drain(name, draining=False)


async def _cut(site: Site, name: str) -> None:
    site.proxies[name].cut()


async def _half_open(site: Site, name: str) -> None:
    """Nothing passes, and neither end notices."""
    with site.proxies[name].held():
        await asyncio.sleep(LASTS_S)


async def _slow(site: Site, name: str) -> None:
    proxy = site.proxies[name]
    proxy.set_round_trip(SLOW_STORE_S if name == VALKEY else SLOW_ROUND_TRIP_S)
    try:
        await asyncio.sleep(LASTS_S)
    finally:
        proxy.set_round_trip(0.0)


async def _until_well(site: Site, name: str) -> None:
    """Waits for a process that is starting up, on which a fault would have no effect."""
    with suppress(TimeoutError):
        async with asyncio.timeout(WELL_WITHIN_S):
            while not await site.fleet.is_well(name):  # noqa: ASYNC110 - only polling shows it
                await asyncio.sleep(POLL_S)


async def _ordered(kind: str, site: Site, name: str) -> None:
    await _until_well(site, name)
    orders.order(site.orders, name, kind, LASTS_S)
    await asyncio.sleep(LASTS_S)


async def _to_the_store(fault: Callable[[tuple[str, int]], Awaitable[None]], site: Site, name: str) -> None:
    endpoint = site.fleet.endpoint(name)
    await _until_well(site, name)
    # A store that dies of another fault meanwhile begins anew and well.
    with suppress(RedisError, TimeoutError):
        await fault((endpoint.host, endpoint.port))


async def _fail_over(site: Site, name: str) -> None:
    await _to_the_store(partial(fail_over, proxy=site.proxies[name]), site, name)


async def _crowd(site: Site, name: str) -> None:
    """Connections without a key and without a request, more than a gateway takes."""
    endpoint = site.fleet.endpoint(name)
    async with AsyncExitStack() as opened:
        for port in (endpoint.port, endpoint.second_port):
            for _ in range(NUM_IDLE_CONNECTIONS):
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(1.0):
                        _, writer = await asyncio.open_connection(endpoint.host, port)
                    opened.callback(writer.close)
        await asyncio.sleep(LASTS_S)


async def _poison(kind: str, site: Site, name: str) -> None:
    """A request that ends every engine that computes it, from a client that goes on as long as it may."""
    del name
    ids = [*orders.POISON[kind], *(site.chance.randrange(10, 4000) for _ in range(20))]
    request = gateway_pb2.GatewayGenerateRequest(
        model=site.fleet.model_name,
        prompt_token_ids=gateway_pb2.TokenIds(ids=ids),
        sampling=common_pb2.SamplingParams(max_tokens=8, seed=1),
    )
    deaths_before = orders.num_deaths(site.orders)
    gateways = [endpoint.second_address for endpoint in site.fleet.endpoints_of("gateway")]
    async with ResumingClient(gateways, api_key=site.keys.stays, patience_s=POISON_PATIENCE_S) as client:
        history = await run_one(over(client), request, index=0)
    num_engines = orders.num_deaths(site.orders) - deaths_before
    site.poisoned.append(Poisoned(kind=kind, history=history, num_engines=num_engines))


async def _break_keys(site: Site, name: str) -> None:
    """A change of the file of keys that withdraws one and spoils other lines; the streams' own key stays."""
    del name
    urls = [f"http://{endpoint.address}" for endpoint in site.fleet.endpoints_of("gateway")]
    async with site.keys.broken(urls) as withdrawn:
        site.withdrawn.append(withdrawn)
        await asyncio.sleep(LASTS_S)


_SERVICES = ("verifier", "drafter", "gateway")
_BEHIND_PROXIES = ("verifier", "drafter", VALKEY)
# Faults, and the roles they are done to.
FAULTS: dict[str, tuple[Callable[[Site, str], Awaitable[None]], tuple[str, ...]]] = {
    KILL: (_kill, (*_SERVICES, VALKEY)),
    "restart": (_restart, _SERVICES),
    "freeze": (_freeze, (*_SERVICES, VALKEY)),
    "drain": (_drain, _SERVICES),
    "cut": (_cut, _BEHIND_PROXIES),
    "half-open": (_half_open, _BEHIND_PROXIES),
    "slow": (_slow, _BEHIND_PROXIES),
    **{kind: (partial(_ordered, kind), ("verifier",)) for kind in (orders.HANG, *WRONG_ANSWERS)},
    orders.FLOOD: (partial(_ordered, orders.FLOOD), ("drafter",)),
    orders.CLOCK: (partial(_ordered, orders.CLOCK), ("gateway", "verifier")),
    "crowd": (_crowd, ("gateway",)),
    "full": (partial(_to_the_store, fill), (VALKEY,)),
    "read-only": (partial(_to_the_store, make_read_only), (VALKEY,)),
    "failed-over": (_fail_over, (VALKEY,)),
    "broken-keys": (_break_keys, (KEY_FILE,)),
    **{f"poison-{kind}": (partial(_poison, kind), (POISONER,)) for kind in orders.POISON},
}


def planned(
    kinds: Sequence[str], names: Mapping[str, Sequence[str]], chance: random.Random, num_rounds: int | None = None
) -> Iterator[Fault]:
    """Yields faults: all kinds in turn, each round in an order of its own, tiers and replicas in turn.

    If kills are asked for, every fourth fault is one: they go on while other things are wrong.

    Args:
        kinds: Kinds from `FAULTS`.
        names: Processes by role.
        chance: Draws the order of each round.
        num_rounds: How often each kind happens, kills apart; None: without end.
    """
    turns = dict.fromkeys(names, 0)
    at = dict.fromkeys(FAULTS, 0)
    rounds = itertools.count() if num_rounds is None else range(num_rounds)
    for kind in (kind for _ in rounds for kind in _round(kinds, chance)):
        roles = [role for role in FAULTS[kind][1] if names.get(role)]
        role = roles[at[kind] % len(roles)]
        at[kind] += 1
        name = names[role][turns[role] % len(names[role])]
        turns[role] += 1
        yield Fault(kind=kind, role=role, name=name)


def _round(kinds: Sequence[str], chance: random.Random) -> Iterator[str]:
    others = [kind for kind in kinds if kind != KILL]
    chance.shuffle(others)
    for index, kind in enumerate(others or kinds):
        if KILL in kinds and others and index % 3 == 0:
            yield KILL
        yield kind


class Disturbance:
    """Does faults to a fleet while a block runs, at an even pace; what they stopped runs again afterwards."""

    def __init__(self, site: Site, plan: Iterator[Fault]) -> None:
        self.done: list[Fault] = []
        self._site = site
        self._plan = plan
        self._under_way: set[asyncio.Task[None]] = set()
        self._busy: dict[str, Fault] = {}
        # The next of the plan, and those that had to wait.
        self._waiting: list[Fault] = []

    async def go_on(self, every_s: float, seconds: float, on_fault: Callable[[Fault], None]) -> None:
        """Does a fault every `every_s` seconds, until the time or the plan is over; waits for the last one."""
        verifiers = [endpoint.name for endpoint in self._site.fleet.endpoints_of("verifier")]
        ends_s = time.perf_counter() + seconds
        while time.perf_counter() + every_s <= ends_s and self._has_more():
            await asyncio.sleep(every_s)
            well = await asyncio.gather(*(self._site.fleet.is_well(name) for name in verifiers))
            fault = self._next(sum(well), len(verifiers))
            if fault is not None:
                self._begin(fault, on_fault)
        await asyncio.gather(*self._under_way)

    def _has_more(self) -> bool:
        """Whether something is left to do; looks ahead as many faults as there are kinds."""
        self._waiting += itertools.islice(self._plan, max(0, len(FAULTS) - len(self._waiting)))
        return bool(self._waiting)

    def _next(self, num_well: int, num_verifiers: int) -> Fault | None:
        """The first fault that may begin now; None: all have to wait."""
        too_few = False
        for index, fault in enumerate(self._waiting):
            needed = fault.num_verifiers_needed(num_verifiers)
            # A fault that waits for verifiers is not overtaken by one that takes more of them away.
            too_few |= needed > num_well
            waits = (too_few and needed) or fault.name in self._busy or self._spoils(fault)
            if not waits:
                return self._waiting.pop(index)
        return None

    def _spoils(self, fault: Fault) -> bool:
        """Whether it would hide deaths that a fault under way counts, or the other way about."""
        if fault.role == POISONER:
            return any(each.hides_deaths for each in self._busy.values())
        return fault.hides_deaths and POISONER in self._busy

    def _begin(self, fault: Fault, on_fault: Callable[[Fault], None]) -> None:
        begun = replace(fault, at_s=time.perf_counter())
        self.done.append(begun)
        on_fault(begun)
        self._busy[begun.name] = begun
        task = asyncio.create_task(self._do(begun))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _do(self, fault: Fault) -> None:
        try:
            await FAULTS[fault.kind][0](self._site, fault.name)
        finally:
            del self._busy[fault.name]
