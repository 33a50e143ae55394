"""The actor: keeps one service running as a process of the node that Ray has put it on.

It starts by itself, so that it works again wherever Ray restarts it. Each life of the process gets free ports of the
node's address and announces itself in the registry; requests never come here.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import ray

from paceline.cluster.foreground import say
from paceline.cluster.ray.order import Order, service_child
from paceline.cluster.spec import Endpoint, Ports
from paceline.cluster.supervisor import Child, ChildSpec
from paceline.core.errors import ConfigError, UnavailableError

# What a process that never got well is given to end.
FAILED_GRACE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of a replica.

    Attributes:
        node: Ray's id of the node it is on.
        pid: Of the process; None between two lives.
        well: Whether the process does its work.
        error: What ended the last life, until the next one is well.
    """

    node: str
    endpoint: Endpoint | None
    pid: int | None
    well: bool
    error: str


class ServiceHost:
    """An actor of Ray that runs one service."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._node = ray.get_runtime_context().get_node_id()
        self._endpoint: Endpoint | None = None
        self._child: Child | None = None
        self._num_lives = 0
        self._error = ""
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name=f"keep {order.name}")

    def __repr__(self) -> str:
        """Its name in Ray's logs and dashboard."""
        return self._order.name

    async def report(self) -> Report:
        """Returns the state of the replica."""
        child = self._child
        well = child is not None and await child.spec.is_healthy()
        return Report(
            node=self._node,
            endpoint=self._endpoint,
            pid=None if child is None else child.pid,
            well=well,
            error="" if well else self._error,
        )

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
        child = Child(service_child(order, self._endpoint), say, order.back_off)
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


def _endpoint(order: Order) -> Endpoint:
    host = own_address()
    with ExitStack() as held:
        ports = Ports(host, held)
        return Endpoint(
            name=order.name,
            role=order.role,
            host=host,
            port=ports.take(order.port, f"{order.role}.port"),
            second_port=ports.take(order.second_port, f"{order.role}.grpc_port"),
        )


def own_address() -> str:
    """Returns the address by which the other hosts of the cluster reach this one."""
    return str(ray.util.get_node_ip_address())
