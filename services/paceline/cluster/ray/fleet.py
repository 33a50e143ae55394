"""A whole fleet on a Ray cluster; `paceline up --ray` runs it.

It places, follows, resizes and stops. Requests never pass through it, and the fleet serves on while Ray is away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.checkpoints.families import is_eagle3
from paceline.checkpoints.source import TEXT_FILES
from paceline.cluster.checkpoints import Checkpoints, fetch_models, resolve_checkpoints, with_heads
from paceline.cluster.drain import DrainConfig, drain
from paceline.cluster.fleet_file import ROLES, RayFleetSpec, check_resize
from paceline.cluster.health import store_health
from paceline.cluster.ray.host import ServiceHost, own_address
from paceline.cluster.ray.order import Order
from paceline.cluster.ray.placement import Bundle, Slot, TierPlacement
from paceline.cluster.ray.replica import Replica
from paceline.cluster.ray.scaling import LagReading, ScalingState, decide, read_lag
from paceline.cluster.spec import FleetSpec, plan_store_port, store_child
from paceline.cluster.supervisor import Supervisor, until_all
from paceline.cluster.valkey import find_server
from paceline.core.addresses import host_port
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from paceline.service.config import public_url

OBSERVE_S = 1.0
DRAIN_TIMEOUT_S = 300.0


class RayFleet:
    """A fleet on Ray; an async context manager that is entered when all replicas are well.

    Args:
        spec: Settings.
        address: Of the Ray cluster, `host:port`, or `auto` for the one this machine belongs to.
        environ: Environment of the store, if one is started here.
        say: Gets a line for whatever a user should know.
    """

    def __init__(
        self, spec: RayFleetSpec, *, address: str, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        self.spec = spec
        self.redis_url = ""
        self.checkpoints: Checkpoints | None = None
        self._services = spec.services
        self._address = address
        self._environ = environ
        self._say = say
        self._replicas: dict[str, list[Replica]] = {role: [] for role in ROLES}
        self._placements: dict[str, TierPlacement] = {}
        self._resizing = {role: asyncio.Lock() for role in ROLES}
        self._exits = AsyncExitStack()
        self._log_dir = Path()

    async def __aenter__(self) -> Self:
        """Starts everything.

        Raises:
            ConfigError: The cluster, a setting or a checkpoint makes it impossible, or a service ended.
            UnavailableError: A service was not well in time.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def replicas(self, role: str) -> Sequence[Replica]:
        """Returns the replicas of a role that are there to stay."""
        return [replica for replica in self._replicas[role] if not replica.leaving]

    async def resize(self, spec: RayFleetSpec) -> None:
        """Takes over new numbers of replicas; sessions on those that go are moved first.

        Raises:
            ConfigError: Something else differs from the present settings.
        """
        check_resize(self.spec, spec)
        self.spec = spec
        for role in ROLES:
            count = spec.num_replicas(role)
            if role == DRAFTER and spec.drafter.settings.scales:
                limits = spec.drafter.settings
                count = max(limits.min_replicas, min(limits.max_replicas, len(self.replicas(role))))
            await self.scale(role, count)

    async def scale(self, role: str, count: int) -> None:
        """Brings a tier to `count` replicas; returns when those that leave are gone, others may still be starting."""
        async with self._resizing[role]:
            present = self.replicas(role)
            if count != len(present):
                self._say(f"{role}s: {len(present)} -> {count}")
            self._add(role, max(0, count - len(present)))
            await asyncio.gather(*(self._retire(replica) for replica in present[count:]))

    async def follow_lag(self) -> None:
        """Keeps the number of drafters at what their lag calls for, until it is cancelled."""
        state = ScalingState()
        while True:
            await asyncio.sleep(OBSERVE_S)
            settings = self.spec.drafter.settings
            if not settings.scales:
                continue
            reading = await self._reading()
            state, count = decide(settings, state, reading, now_s=time.monotonic())
            if count != reading.num_replicas:
                self._say(f"drafters lag {reading.lag_tokens:g} tokens behind")
                await self.scale(DRAFTER, count)

    async def stop(self) -> None:
        """Stops everything, gateways first, and leaves the Ray cluster as it was."""
        deadline_s = time.monotonic() + self._services.grace_s
        try:
            for roles in ((GATEWAY,), (VERIFIER, DRAFTER)):
                left_s = max(0.0, deadline_s - time.monotonic())
                leaving = [replica for role in roles for replica in self._replicas[role]]
                await asyncio.gather(*(replica.stop(left_s) for replica in leaving))
        finally:
            for placement in self._placements.values():
                placement.remove_all()
            await self._exits.aclose()

    async def _start(self) -> None:
        named = await asyncio.to_thread(fetch_models, self.spec.services, self._say, files=TEXT_FILES)
        self._services = services = with_heads(named)
        self.checkpoints = await asyncio.to_thread(resolve_checkpoints, services, self._environ, self._say)
        await asyncio.to_thread(_connect, self._address)
        self._exits.push_async_callback(asyncio.to_thread, ray.shutdown)
        self._log_dir = services.log_dir or Path(tempfile.gettempdir()) / f"paceline-{secrets.token_hex(4)}"
        self.redis_url = await self._exits.enter_async_context(shared_store(services, self._environ, self._say))
        for role in ROLES:
            self._placements[role] = TierPlacement(
                self.spec.tier(role), make=_make_group, remove=remove_placement_group
            )
            self._add(role, self.spec.num_replicas(role))
        everyone = [replica for role in ROLES for replica in self._replicas[role]]
        await until_all(replica.until_well(services.start_timeout_s) for replica in everyone)

    def _add(self, role: str, count: int) -> None:
        """Places `count` more replicas; Ray starts them when there is room."""
        taken = {replica.name for replica in self._replicas[role]}
        names = (name for number in range(len(taken) + count) if (name := f"{role}-{number}") not in taken)
        for name, slot in zip(names, self._placements[role].take(count), strict=False):
            actor = self._actor(self._order(role, name), slot)
            self._replicas[role].append(Replica(name, role, slot, actor, self._say))

    async def _retire(self, replica: Replica) -> None:
        """Takes the sessions off a replica, and then the replica away."""
        replica.leaving = True
        try:
            await drain(DrainConfig(replica=replica.name, redis_url=self.redis_url, timeout_s=DRAIN_TIMEOUT_S))
        except (ConfigError, UnavailableError) as error:
            # It has no sessions if it is not known; any session that is left goes on elsewhere when it ends.
            self._say(str(error))
        await replica.stop(self._services.grace_s)
        self._placements[replica.role].give_back(replica.slot)
        self._replicas[replica.role].remove(replica)
        self._say(f"{replica.name} is stopped")

    def _order(self, role: str, name: str) -> Order:
        assert self.checkpoints is not None, "the fleet is not started"
        tier = self.spec.tier(role)
        checkpoint = self.checkpoints.target
        if role == DRAFTER:
            checkpoint = self.checkpoints.draft_of(int(name.rpartition("-")[2]))
        settings = self.spec.gateway.settings
        return Order(
            name=name,
            role=role,
            services=self._services,
            checkpoint=checkpoint,
            target=self.checkpoints.target if role == DRAFTER and is_eagle3(checkpoint) else None,
            redis_url=self.redis_url,
            log_dir=self._log_dir,
            num_threads=max(1, int(tier.settings.cpus)),
            port=settings.port if role == GATEWAY else 0,
            second_port=settings.grpc_port if role == GATEWAY else 0,
            env=tier.env,
        )

    def _actor(self, order: Order, slot: Slot) -> Any:
        """Asks Ray for the actor of a replica."""
        tier = self.spec.tier(order.role)
        host: Any = ray.remote(ServiceHost)
        return host.options(
            num_cpus=tier.settings.cpus,
            num_gpus=tier.settings.gpus,
            resources=dict(tier.resources),
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                slot.group.handle, placement_group_bundle_index=slot.bundle
            ),
        ).remote(order)

    async def _reading(self) -> LagReading:
        drafters = self.replicas(DRAFTER)
        endpoints = [replica.endpoint for replica in drafters]
        pages = [endpoint.second_address for endpoint in endpoints if endpoint is not None]
        return LagReading(
            num_replicas=len(drafters),
            num_starting=len(drafters) - len(pages),
            lag_tokens=await read_lag(pages),
        )


def _connect(address: str) -> None:
    """Joins the cluster as a driver; all that is started ends with this process at the latest.

    Raises:
        ConfigError: It cannot be reached.
    """
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray {address}: {error}") from error


def _make_group(bundles: Sequence[Bundle], strategy: str) -> Any:
    return placement_group([dict(bundle) for bundle in bundles], strategy=strategy)


@asynccontextmanager
async def shared_store(
    services: FleetSpec, environ: Mapping[str, str], say: Callable[[str], None]
) -> AsyncIterator[str]:
    """Yields the URL of a store that all hosts reach; one started here has a password and ends with the block.

    Raises:
        ConfigError: Its port is taken, or there is no server program.
    """
    if services.redis_url is not None:
        say(f"using the store at {public_url(services.redis_url)}")
        yield services.redis_url
        return
    host = own_address()
    port, password = plan_store_port(replace(services, host=host)), secrets.token_urlsafe(24)
    url = f"redis://:{password}@{host_port(host, port)}"
    supervisor = Supervisor(say)
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as work_dir:
        child = store_child(find_server(services.redis_server), host, port, Path(work_dir), environ)
        # Every user of the host may read command lines; only the owner may read the folder.
        settings = Path(work_dir) / "valkey.conf"
        settings.write_text(f"requirepass {password}\n", encoding="ascii")
        server, *flags = child.argv
        guarded = replace(child, argv=(server, str(settings), *flags), is_healthy=store_health(url))
        try:
            await supervisor.start([guarded], services.start_timeout_s)
            yield url
        finally:
            await supervisor.stop(services.grace_s)
