"""The launcher: a whole fleet on a Ray cluster; `paceline up --ray` runs it.

It places, follows and stops. Requests never pass through it, and the fleet serves on while Ray is away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.checkpoints.source import TEXT_FILES
from paceline.cluster.checkpoints import Checkpoints, fetch_models, resolve_checkpoints, with_heads
from paceline.cluster.fleet_file import RayTier, check_for_ray
from paceline.cluster.ray.host import Report, ServiceHost, ServiceSpec, own_address
from paceline.cluster.spec import STORE_FLAG, FleetSpec, Ports, ServicePort, store_child
from paceline.cluster.supervisor import ProcessSupervisor, until_all
from paceline.cluster.valkey import find_server, store_health
from paceline.core.addresses import host_port
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from paceline.service.config import public_url

LOOK_S = 0.5
# An actor that does not answer for this long counts as lost.
ANSWER_S = 10.0
# Time beyond the service's own for an actor to report that it has stopped.
LAST_ANSWER_S = 5.0
NODE_CHARS = 8
# Takes the least of the resource by which Ray marks nodes with a kind of accelerator.
ACCELERATOR_SHARE = 0.001


@dataclass(slots=True, kw_only=True, eq=False)
class RayReplica:
    """A replica as the launcher knows it: its actor, and that actor's last report."""

    name: str
    role: str
    actor: Any
    group: Any
    report: Report | None = None
    has_answered: bool = False
    said: str = ""

    @property
    def endpoint(self) -> ServicePort | None:
        """Where it listens; None while it is not well."""
        return self.report.endpoint if self.report is not None and self.report.well else None

    async def look(self) -> None:
        """Asks the actor for its report.

        Ray keeps a question to an actor that it has yet to place, and fails one to an actor that is lost.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                self.report, self.has_answered = await self.actor.report.remote(), True
        except (RayError, TimeoutError):
            self.report = None

    def news(self) -> str:
        """Returns a line on its state if that has changed."""
        before, self.said = self.said, self._state() if self.has_answered else ""
        return self.said if self.said != before else ""

    async def stop(self, grace_s: float) -> None:
        """Ends its process, which gets `grace_s` seconds to finish, and its actor."""
        if self.has_answered:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(grace_s + LAST_ANSWER_S):
                    await self.actor.stop.remote(grace_s)
        ray.kill(self.actor, no_restart=True)

    def _state(self) -> str:
        report = self.report
        if report is None:
            return f"{self.name} is lost: Ray looks for a place for it"
        if report.error:
            return f"{self.name} is down: {report.error}"
        if not report.well or report.endpoint is None:
            return f"{self.name} starts"
        first, second = ("http", "grpc") if self.role == GATEWAY else ("grpc", "metrics")
        doors = f"{first} {report.endpoint.address}, {second} {report.endpoint.second_address}"
        return f"{self.name} is well: node {report.node[:NODE_CHARS]}, {doors}, pid {report.pid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFleet:
    """A fleet on Ray, made by `ray_fleet`.

    Attributes:
        tiers: Resources that replicas take of the cluster, by role.
        say: Gets a line for whatever a user should know.
    """

    spec: FleetSpec
    tiers: Mapping[str, RayTier]
    checkpoints: Checkpoints
    redis_url: str
    log_dir: Path
    say: Callable[[str], None]
    replicas: list[RayReplica] = field(default_factory=list)

    def endpoints(self, role: str) -> list[ServicePort]:
        """Returns where the replicas of a role listen that are well."""
        return [each.endpoint for each in self.replicas if each.role == role and each.endpoint is not None]

    async def follow(self) -> None:
        """Says what becomes of each replica; never returns."""
        await until_all(self._watch(each) for each in self.replicas)

    async def stop(self) -> None:
        """Stops all replicas, gateways first."""
        deadline_s = time.monotonic() + self.spec.grace_s
        try:
            for roles in ((GATEWAY,), (VERIFIER, DRAFTER)):
                left_s = max(0.0, deadline_s - time.monotonic())
                await asyncio.gather(*(each.stop(left_s) for each in self.replicas if each.role in roles))
        finally:
            for group in {id(each.group): each.group for each in self.replicas}.values():
                remove_placement_group(group)

    async def until_well(self) -> None:
        """Returns once all replicas are well.

        Raises:
            ConfigError: A service ended.
            UnavailableError: A service was not well in time.
        """
        timeout_s = self.spec.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await until_all(self._watch(each, until_well=True) for each in self.replicas)
        except TimeoutError:
            for late in (each for each in self.replicas if each.endpoint is None):
                why = "" if late.has_answered else ": Ray has found no node with room for it"
                raise UnavailableError(f"{late.name} was not ready within {timeout_s:g} s{why}") from None

    async def _watch(self, replica: RayReplica, *, until_well: bool = False) -> None:
        """Says what becomes of a replica; raises `ConfigError` where the first start fails."""
        while not (until_well and replica.endpoint):
            await replica.look()
            if line := replica.news():
                self.say(line)
            if until_well and replica.report is not None and replica.report.error:
                raise ConfigError(replica.report.error)
            await asyncio.sleep(LOOK_S)

    def place(self, role: str, count: int) -> None:
        """Places the replicas of a role, spread by one group; Ray starts them when there is room."""
        if not count:
            return
        tier = self.tiers[role]
        group = placement_group([bundle_of(tier)] * count, strategy=tier.strategy)
        for number in range(count):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            order = ServiceSpec(
                role=role,
                number=number,
                services=self.spec,
                checkpoints=self.checkpoints,
                redis_url=self.redis_url,
                log_dir=self.log_dir,
                tier=tier,
            )
            host: Any = ray.remote(ServiceHost)
            actor = host.options(
                num_cpus=tier.cpus,
                num_gpus=tier.gpus,
                resources=dict(tier.resources),
                max_restarts=-1,
                scheduling_strategy=place,
            ).remote(order)
            self.replicas.append(RayReplica(name=order.name, role=role, actor=actor, group=group))


@asynccontextmanager
async def ray_fleet(
    spec: FleetSpec, tiers: Mapping[str, RayTier], *, environ: Mapping[str, str], say: Callable[[str], None]
) -> AsyncIterator[RayFleet]:
    """Yields a fleet whose replicas are well; at the end stops everything, and leaves the Ray cluster as it was.

    Args:
        spec: Settings; `spec.ray` is the address of the cluster.
        tiers: Resources that replicas take of the cluster, by role.
        environ: Environment of the store, if one is started here.
        say: Gets a line for whatever a user should know.

    Raises:
        ConfigError: The cluster, a setting or a checkpoint makes it impossible, or a service ended.
        UnavailableError: A service was not well in time.
    """
    check_for_ray(spec)
    spec = with_heads(await asyncio.to_thread(fetch_models, spec, say, files=TEXT_FILES))
    checkpoints = await asyncio.to_thread(resolve_checkpoints, spec, environ, say)
    async with AsyncExitStack() as exits:
        await asyncio.to_thread(_connect, spec.ray)
        exits.push_async_callback(asyncio.to_thread, ray.shutdown)
        log_dir = spec.log_dir or Path(tempfile.gettempdir()) / f"paceline-{secrets.token_hex(4)}"
        url = await exits.enter_async_context(shared_store(spec, environ, say))
        fleet = RayFleet(spec=spec, tiers=tiers, checkpoints=checkpoints, redis_url=url, log_dir=log_dir, say=say)
        exits.push_async_callback(fleet.stop)
        fleet.place(GATEWAY, spec.num_gateways)
        fleet.place(VERIFIER, spec.num_verifiers)
        fleet.place(DRAFTER, spec.num_drafters if spec.drafter else 0)
        await fleet.until_well()
        yield fleet


def bundle_of(tier: RayTier) -> dict[str, float]:
    bundle = {"CPU": tier.cpus, **tier.resources}
    if tier.gpus:
        bundle["GPU"] = tier.gpus
    if tier.accelerator_type:
        bundle[f"accelerator_type:{tier.accelerator_type}"] = ACCELERATOR_SHARE
    return bundle


def _connect(address: str) -> None:
    """Joins the cluster as a driver; all that is started ends with this process at the latest.

    Raises:
        ConfigError: It cannot be reached.
    """
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"--ray {address}: {error}") from error


@asynccontextmanager
async def shared_store(spec: FleetSpec, environ: Mapping[str, str], say: Callable[[str], None]) -> AsyncIterator[str]:
    """Yields the URL of a store that all hosts reach; one started here has a password and ends with the block.

    Raises:
        ConfigError: Its port is taken, or there is no server program.
    """
    if spec.redis_url is not None:
        say(f"using the store at {public_url(spec.redis_url)}")
        yield spec.redis_url
        return
    host = own_address()
    with ExitStack() as held:
        port = Ports(host, held).take(spec.moved(spec.redis_port), STORE_FLAG)
    password = secrets.token_urlsafe(24)
    url = f"redis://:{password}@{host_port(host, port)}"
    supervisor = ProcessSupervisor(say)
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as work_dir:
        child = store_child(find_server(spec.redis_server), host, port, Path(work_dir), environ)
        # Every user of the host may read command lines; only the owner may read the folder.
        settings = Path(work_dir) / "valkey.conf"
        settings.write_text(f"requirepass {password}\n", encoding="ascii")
        server, *flags = child.argv
        guarded = replace(child, argv=(server, str(settings), *flags), is_healthy=store_health(url))
        try:
            await supervisor.start([guarded], spec.start_timeout_s)
            yield url
        finally:
            await supervisor.stop(spec.grace_s)
