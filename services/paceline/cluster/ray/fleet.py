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
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.checkpoints.families import is_eagle3
from paceline.checkpoints.source import TEXT_FILES
from paceline.cluster.checkpoints import Checkpoints, fetch_models, resolve_checkpoints, with_heads
from paceline.cluster.fleet_file import RayTier, check_for_ray
from paceline.cluster.ray.host import Report, ServiceHost, ServiceSpec, own_address
from paceline.cluster.spec import STORE_FLAG, FleetSpec, Ports, ServicePort, store_child
from paceline.cluster.supervisor import ProcessSupervisor
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
    _answer: asyncio.Future[Report] | None = field(default=None, init=False)
    _asked_s: float = field(default=0.0, init=False)

    @property
    def endpoint(self) -> ServicePort | None:
        """Where it listens; None while it is not well."""
        return self.report.endpoint if self.report is not None and self.report.well else None

    async def look(self) -> None:
        """Waits a moment for the actor's report, and asks for the next one afterwards.

        Ray keeps a question to an actor that it has yet to place, and fails one to an actor that is lost.
        """
        if self._answer is None:
            self._answer = asyncio.wrap_future(self.actor.report.remote().future())
            self._asked_s = time.monotonic()
        done, _ = await asyncio.wait({self._answer}, timeout=LOOK_S)
        if done:
            answer, self._answer = self._answer, None
            if answer.cancelled():
                # It is being stopped; others are still looked at.
                return
            try:
                self.report, self.has_answered = answer.result(), True
            except RayError:
                self.report = None
        elif time.monotonic() - self._asked_s > ANSWER_S:
            self.report = None

    def news(self) -> str:
        """Returns a line on its state if that has changed."""
        before, self.said = self.said, self._state() if self.has_answered else ""
        return self.said if self.said != before else ""

    async def stop(self, grace_s: float) -> None:
        """Ends its process, which gets `grace_s` seconds to finish, and its actor."""
        if self._answer is not None:
            self._answer.cancel()
        if self.has_answered:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(grace_s + LAST_ANSWER_S):
                    await asyncio.wrap_future(self.actor.stop.remote(grace_s).future())
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


class RayFleet:
    """A fleet on Ray; an async context manager that is entered when all replicas are well.

    Args:
        spec: Settings; `spec.ray` is the address of the cluster.
        tiers: Resources that replicas take of the cluster, by role.
        environ: Environment of the store, if one is started here.
        say: Gets a line for whatever a user should know.
    """

    def __init__(
        self, spec: FleetSpec, tiers: Mapping[str, RayTier], *, environ: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        check_for_ray(spec)
        self.spec = spec
        self.redis_url = ""
        self.checkpoints: Checkpoints | None = None
        self._tiers = tiers
        self._environ = environ
        self._say = say
        self._replicas: list[RayReplica] = []
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

    def endpoints(self, role: str) -> list[ServicePort]:
        """Returns where the replicas of a role listen that are well."""
        return [each.endpoint for each in self._replicas if each.role == role and each.endpoint is not None]

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._look()

    async def stop(self) -> None:
        """Stops everything, gateways first, and leaves the Ray cluster as it was."""
        deadline_s = time.monotonic() + self.spec.grace_s
        try:
            for roles in ((GATEWAY,), (VERIFIER, DRAFTER)):
                left_s = max(0.0, deadline_s - time.monotonic())
                await asyncio.gather(*(each.stop(left_s) for each in self._replicas if each.role in roles))
        finally:
            for group in {id(each.group): each.group for each in self._replicas}.values():
                remove_placement_group(group)
            self._replicas.clear()
            await self._exits.aclose()

    async def _start(self) -> None:
        self.spec = spec = with_heads(await asyncio.to_thread(fetch_models, self.spec, self._say, files=TEXT_FILES))
        self.checkpoints = await asyncio.to_thread(resolve_checkpoints, spec, self._environ, self._say)
        await asyncio.to_thread(_connect, spec.ray)
        self._exits.push_async_callback(asyncio.to_thread, ray.shutdown)
        self._log_dir = spec.log_dir or Path(tempfile.gettempdir()) / f"paceline-{secrets.token_hex(4)}"
        self.redis_url = await self._exits.enter_async_context(shared_store(spec, self._environ, self._say))
        self._place(GATEWAY, spec.num_gateways)
        self._place(VERIFIER, spec.num_verifiers)
        self._place(DRAFTER, spec.num_drafters if spec.drafter else 0)
        await self._until_well(spec.start_timeout_s)

    async def _until_well(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while waiting := [each for each in self._replicas if each.endpoint is None]:
            await self._look()
            for error in (each.report.error for each in waiting if each.report is not None and each.report.error):
                raise ConfigError(error)
            if time.monotonic() > deadline_s:
                why = "" if waiting[0].has_answered else ": Ray has found no node with room for it"
                raise UnavailableError(f"{waiting[0].name} was not ready within {timeout_s:g} s{why}")
            await asyncio.sleep(LOOK_S)

    async def _look(self) -> None:
        await asyncio.gather(*(each.look() for each in self._replicas))
        for line in filter(None, (each.news() for each in self._replicas)):
            self._say(line)

    def _place(self, role: str, count: int) -> None:
        """Places the replicas of a role, spread by one group; Ray starts them when there is room."""
        if not count:
            return
        tier = self._tiers[role]
        group = placement_group([bundle_of(tier)] * count, strategy=tier.strategy)
        for number in range(count):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            order = self._order(role, number)
            host: Any = ray.remote(ServiceHost)
            actor = host.options(
                num_cpus=tier.cpus,
                num_gpus=tier.gpus,
                resources=dict(tier.resources),
                max_restarts=-1,
                scheduling_strategy=place,
            ).remote(order)
            self._replicas.append(RayReplica(name=order.name, role=role, actor=actor, group=group))

    def _order(self, role: str, number: int) -> ServiceSpec:
        assert self.checkpoints is not None, "the fleet is not started"
        spec, tier, checkpoint = self.spec, self._tiers[role], self.checkpoints.target
        if role == DRAFTER:
            checkpoint = self.checkpoints.draft_of(number)
        ports = (spec.gateway_port, spec.gateway_grpc_port) if role == GATEWAY else (0, 0)
        port, second_port = (spec.moved(first, number) for first in ports)
        threads = {VERIFIER: spec.verifier_threads, DRAFTER: spec.drafter_threads}.get(role)
        return ServiceSpec(
            name=f"{role}-{number}",
            role=role,
            services=spec,
            checkpoint=checkpoint,
            target=self.checkpoints.target if role == DRAFTER and is_eagle3(checkpoint) else None,
            redis_url=self.redis_url,
            log_dir=self._log_dir,
            num_threads=threads or max(1, int(tier.cpus)),
            port=port,
            second_port=second_port,
            env=tier.env,
        )


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
