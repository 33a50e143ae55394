"""The actor: keeps one service running as a process of the node that Ray has put it on.

It starts by itself, so that it works again wherever Ray restarts it. It gets free ports of the node's address and
announces itself in the registry; requests never come here.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import ray

from paceline.checkpoints.families import is_eagle3
from paceline.checkpoints.source import Repository, repository_of
from paceline.cluster.checkpoints import Checkpoints
from paceline.cluster.fleet_file import RayTier
from paceline.cluster.foreground import say
from paceline.cluster.spec import CpuShare, FleetSpec, Launch, Ports, ServicePort
from paceline.cluster.supervisor import ChildSpec, ProcessSupervisor
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import DRAFTER, GATEWAY

# Grace of a process that never got well, and pause until the next one starts.
FAILED_GRACE_S, RETRY_S = 2.0, 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A replica that an actor is to run.

    Attributes:
        number: Its number among the replicas of its role.
        checkpoints: Folders of the models, on every node but for snapshots of the Hub.
        tier: Its resources, of which whole CPUs are threads, and variables added to the node's environment.
    """

    role: str
    number: int
    services: FleetSpec
    checkpoints: Checkpoints
    redis_url: str
    log_dir: Path
    tier: RayTier

    @property
    def name(self) -> str:
        """The replica's name, in the registry too."""
        return f"{self.role}-{self.number}"

    def child(self, endpoint: ServicePort) -> ChildSpec:
        """Returns the process of the replica on this node."""
        spec, target, drafts = self.services, self.checkpoints.target, self.role == DRAFTER
        environ = {**os.environ, **self.tier.env}
        launch = Launch(spec=spec, redis_url=self.redis_url, log_dir=self.log_dir, environ=environ)
        if self.role == GATEWAY:
            return launch.gateway(endpoint, _anywhere(target))
        checkpoint = self.checkpoints.draft_of(self.number) if drafts else target
        threads = spec.drafter_threads if drafts else spec.verifier_threads
        return launch.model(
            endpoint,
            _anywhere(checkpoint),
            CpuShare(num_threads=threads or max(1, int(self.tier.cpus)), cpus=()),
            announce=endpoint.address,
            target=_anywhere(target) if drafts and is_eagle3(checkpoint) else None,
        )

    def endpoint(self, held: ExitStack) -> ServicePort:
        """Returns where the replica listens on this node; its ports are held until `held` is closed."""
        spec, host = self.services, own_address()
        firsts = (spec.gateway_port, spec.gateway_grpc_port) if self.role == GATEWAY else (0, 0)
        flags = f"--{self.role}-port", f"--{self.role}-grpc-port"
        wanted = [(spec.moved(first, self.number), flag) for first, flag in zip(firsts, flags, strict=True)]
        port, second_port = Ports(host, held).take_all(wanted)
        return ServicePort(name=self.name, role=self.role, host=host, port=port, second_port=second_port)


def _anywhere(checkpoint: Path) -> Path | Repository:
    """The name of a checkpoint on every node: a repository of the Hub, or a folder that is on all of them."""
    return repository_of(checkpoint) or checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of a replica; `error` is the reason of a failed start, until the next one succeeds."""

    node: str
    endpoint: ServicePort | None = None
    pid: int | None = None
    well: bool = False
    error: str = ""


class ServiceHost:
    """An actor of Ray that runs one service."""

    def __init__(self, order: ServiceSpec) -> None:
        self._order = order
        self._node = ray.get_runtime_context().get_node_id()
        self._held = ExitStack()
        self._endpoint: ServicePort | None = None
        self._processes = ProcessSupervisor(say)
        self._error = ""
        self._starter = asyncio.get_running_loop().create_task(self._start(), name=f"start {order.name}")

    def __repr__(self) -> str:
        """Its name in Ray's logs and dashboard."""
        return self._order.name

    async def report(self) -> Report:
        child = next(iter(self._processes.children), None)
        if child is None:
            return Report(node=self._node, error=self._error)
        well = await child.spec.is_healthy()
        error = "" if well else self._error
        return Report(node=self._node, endpoint=self._endpoint, pid=child.pid, well=well, error=error)

    async def stop(self, grace_s: float) -> None:
        """Ends the process, which gets `grace_s` seconds to finish, and keeps it ended."""
        self._starter.cancel()
        await asyncio.gather(self._starter, return_exceptions=True)
        logs = [child.spec.log_path for child in self._processes.children]
        await self._processes.stop(grace_s)
        for path in logs:
            # Nothing is left on the node, unless the user wants logs.
            if self._order.services.log_dir is None and path is not None:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # others still log there
                    path.parent.rmdir()

    async def _start(self) -> None:
        """Starts the process, which is then kept running; a start that fails is tried again, with other ports."""
        order = self._order
        while True:
            try:
                order.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._endpoint = order.endpoint(self._held)
                await self._processes.start([order.child(self._endpoint)], order.services.start_timeout_s)
                self._error = ""
                return
            except (ConfigError, UnavailableError, OSError) as error:
                self._error = str(error)
            say(f"{self._error}; it is started again")
            await self._processes.stop(FAILED_GRACE_S)
            self._held.close()
            await asyncio.sleep(RETRY_S)


def own_address() -> str:
    """Returns the address by which the other hosts of the cluster reach this one."""
    return str(ray.util.get_node_ip_address())
