"""The actor: keeps one service running as a process of the node that Ray has put it on.

It starts by itself, so that it works again wherever Ray restarts it. Each life of the process gets free ports of the
node's address and announces itself in the registry; requests never come here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray

from paceline.checkpoints.source import Repository, repository_of
from paceline.cluster.foreground import say
from paceline.cluster.spec import CpuShare, FleetSpec, Launch, Ports, ServicePort
from paceline.cluster.supervisor import Child, ChildSpec
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.messages import GATEWAY
from paceline.service.supervision import BackOff

# Grace of a process that never got well.
FAILED_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """A replica that an actor is to run.

    Attributes:
        name: The replica's name, in the registry too.
        checkpoint: Folder of its model, on every node but for snapshots of the Hub; of a gateway that of the tokenizer.
        target: Folder of the target, for the drafter of an EAGLE-3 head.
        num_threads: Threads of a forward pass.
        port: The service's port; 0: a free one.
        second_port: Port of its metrics; of a gateway, its gRPC port; 0: a free one.
        env: Variables added to the node's environment.
    """

    name: str
    role: str
    services: FleetSpec
    checkpoint: Path
    target: Path | None
    redis_url: str
    log_dir: Path
    num_threads: int
    port: int = 0
    second_port: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    back_off: BackOff = field(default_factory=BackOff)

    def child(self, endpoint: ServicePort) -> ChildSpec:
        """Returns the process of the replica on this node."""
        environ = {**os.environ, **self.env}
        launch = Launch(spec=self.services, redis_url=self.redis_url, log_dir=self.log_dir, environ=environ)
        if self.role == GATEWAY:
            return launch.gateway(endpoint, _anywhere(self.checkpoint))
        return launch.model(
            endpoint,
            _anywhere(self.checkpoint),
            CpuShare(num_threads=self.num_threads, cpus=()),
            announce=endpoint.address,
            target=None if self.target is None else _anywhere(self.target),
        )


def _anywhere(checkpoint: Path) -> Path | Repository:
    """The name of a checkpoint on every node: a repository of the Hub, or a folder that is on all of them."""
    return repository_of(checkpoint) or checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of a replica; `error` is what ended the last life, until the next one is well."""

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
        self._endpoint: ServicePort | None = None
        self._child: Child | None = None
        self._num_lives = 0
        self._error = ""
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name=f"keep {order.name}")

    def __repr__(self) -> str:
        """Its name in Ray's logs and dashboard."""
        return self._order.name

    async def report(self) -> Report:
        child, endpoint = self._child, self._endpoint
        if child is None:
            return Report(node=self._node, error=self._error)
        well = await child.spec.is_healthy()
        return Report(node=self._node, endpoint=endpoint, pid=child.pid, well=well, error="" if well else self._error)

    async def stop(self, grace_s: float) -> None:
        """Ends the process, which gets `grace_s` seconds to finish, and keeps it ended."""
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        if self._child is not None:
            await self._child.stop(grace_s)
            self._remove_log(self._child.spec)

    async def _keep(self) -> None:
        delay_s: float | None = None
        while True:
            started_s = time.monotonic()
            try:
                self._error = await self._live()
            except (ConfigError, UnavailableError, OSError) as error:
                self._error = str(error)
            self._child = None
            delay_s = self._order.back_off.delay_s(delay_s, time.monotonic() - started_s)
            say(f"{self._error}; start {self._num_lives + 1} in {delay_s:g} s")
            await asyncio.sleep(delay_s)

    async def _live(self) -> str:
        """Runs one process from its start to its end; returns what ended it.

        Raises:
            ConfigError: It ended before it was well, or there is no port for it.
            UnavailableError: It was not well in time.
        """
        order = self._order
        order.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._endpoint = _endpoint(order)
        child = Child(order.child(self._endpoint), say, order.back_off)
        self._num_lives += 1
        self._child = child
        try:
            await child.until_healthy(order.services.start_timeout_s)
            return await child.until_ended()
        except (ConfigError, UnavailableError):
            await child.stop(FAILED_GRACE_S)
            raise

    def _remove_log(self, spec: ChildSpec) -> None:
        """Leaves nothing on the node, unless the user wants logs."""
        if self._order.services.log_dir is None and spec.log_path is not None:
            spec.log_path.unlink(missing_ok=True)
            with suppress(OSError):  # others still log there
                spec.log_path.parent.rmdir()


def _endpoint(order: ServiceSpec) -> ServicePort:
    host = own_address()
    with ExitStack() as held:
        ports = Ports(host, held)
        return ServicePort(
            name=order.name,
            role=order.role,
            host=host,
            port=ports.take(order.port, f"--{order.role}-port"),
            second_port=ports.take(order.second_port, f"--{order.role}-grpc-port"),
        )


def own_address() -> str:
    """Returns the address by which the other hosts of the cluster reach this one."""
    return str(ray.util.get_node_ip_address())
