"""A whole fleet on this machine, each service its own process; `paceline up` and the benches run it.

It starts and supervises; requests never pass through it.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from paceline.checkpoints.families import is_eagle3
from paceline.checkpoints.safetensor_files import num_parameters
from paceline.checkpoints.source import served_name
from paceline.cluster.checkpoints import Checkpoints, fetch_models, resolve_checkpoints, with_heads
from paceline.cluster.spec import (
    STORE,
    FleetSpec,
    Launch,
    Ports,
    ServicePort,
    available_cpus,
    gateway_scheme,
    plan_endpoints,
    share_cpus,
    share_memory,
    store_child,
)
from paceline.cluster.supervisor import Child, ChildSpec, ProcessSupervisor
from paceline.cluster.valkey import find_server
from paceline.service.config import named, public_url
from paceline.service.credentials import read_certificates, utc_now
from paceline.service.supervision import BackOff
from paceline.store.base import require
from paceline.store.redis import open_store, require_server


class LocalFleet:
    """A fleet of processes; an async context manager that is entered when all of them are well.

    Roles are `gateway`, `verifier`, `drafter` and `valkey`; a role names its first replica, `verifier-1` the
    second.
    """

    def __init__(
        self,
        spec: FleetSpec,
        *,
        environ: Mapping[str, str],
        say: Callable[[str], None] = lambda _: None,
        back_off: BackOff | None = None,
        announce: Callable[[ServicePort], str] = lambda _: "",
        modules: Mapping[str, str] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
            environ: Environment of the services.
            say: Gets a line for whatever a user should know.
            back_off: Pauses before restarts.
            announce: The address of a verifier, a drafter or the store that others get, such as that of a proxy;
                empty: its own.
            modules: By role, what is started instead of `paceline.verifier` and the like; takes the same flags.
        """
        self.spec = spec
        self.redis_url = ""
        self.endpoints: list[ServicePort] = []
        self.log_dir = Path()
        self.checkpoints: Checkpoints | None = None
        self._environ = environ
        self._say = say
        self._announce = announce
        self._modules = modules or {}
        self._supervisor = ProcessSupervisor(say, back_off)
        self._temporary_dir: Path | None = None
        # Its ports, until it has stopped.
        self._held = ExitStack()

    async def __aenter__(self) -> Self:
        """Starts everything.

        Raises:
            ConfigError: A setting, a port or a checkpoint makes it impossible, or a service ended.
            UnavailableError: A service was not well in time.
        """
        try:
            await self._start()
        except BaseException:
            # The logs stay: the error names one of them.
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def gateway_url(self) -> str:
        return f"{gateway_scheme(self.spec)}://{self.endpoint('gateway').address}"

    @property
    def model_name(self) -> str:
        """Name of the model to ask the gateways for."""
        assert self.checkpoints is not None, "the fleet is not started"
        return served_name(self.checkpoints.target)

    def endpoint(self, role: str) -> ServicePort:
        """Returns where a service listens.

        Raises:
            KeyError: There is none of that role or name.
        """
        for endpoint in self.endpoints:
            if role in (endpoint.role, endpoint.name):
                return endpoint
        raise KeyError(role)

    def endpoints_of(self, role: str) -> list[ServicePort]:
        return [endpoint for endpoint in self.endpoints if endpoint.role == role]

    def kill(self, role: str) -> None:
        """Kills a process; the fleet restarts it."""
        self._child(role).send_signal(signal.SIGKILL)

    def terminate(self, role: str) -> None:
        """Asks a process to end gracefully; the fleet restarts it afterwards."""
        self._child(role).send_signal(signal.SIGTERM)

    def pause(self, role: str) -> None:
        self._child(role).send_signal(signal.SIGSTOP)

    def resume(self, role: str) -> None:
        self._child(role).send_signal(signal.SIGCONT)

    def pid(self, role: str) -> int:
        return self._child(role).pid

    def restart_count(self, role: str) -> int:
        return self._child(role).num_restarts

    async def is_well(self, role: str) -> bool:
        return await self._child(role).spec.is_healthy()

    async def until_restarted(self, role: str, count: int) -> None:
        """Returns when a process was restarted `count` times in all and is well again."""
        child = self._child(role)
        await child.until_restarted(count)
        await child.until_healthy(self.spec.start_timeout_s)

    async def stop(self) -> None:
        """Stops everything, gateways first, and removes temporary logs; no process outlives this call."""
        await self._end()
        if self._temporary_dir is not None:
            shutil.rmtree(self._temporary_dir, ignore_errors=True)
            self._temporary_dir = None

    async def _end(self) -> None:
        await self._supervisor.stop(self.spec.grace_s)
        self._held.close()

    async def _start(self) -> None:
        environ = self._environ
        if self.spec.redis_url is not None:
            require_server(self.spec.redis_url)
        if self.spec.tls_cert is not None:
            read_certificates("--tls-cert", self.spec.tls_cert, utc_now())
        spec = with_heads(await asyncio.to_thread(fetch_models, self.spec, self._say))
        self.spec = spec
        self.checkpoints = await asyncio.to_thread(resolve_checkpoints, spec, environ, self._say)
        self.endpoints = plan_endpoints(spec, Ports(spec.host, self._held))
        self._temporary_dir = Path(tempfile.mkdtemp(prefix="paceline-"))
        self.log_dir = self._temporary_dir if spec.log_dir is None else spec.log_dir.absolute()
        with named("--log-dir", self.log_dir):
            self.log_dir.mkdir(parents=True, exist_ok=True)
        store = await self._plan_store(self._temporary_dir)
        launch = Launch(
            spec=spec, redis_url=self.redis_url, log_dir=self.log_dir, environ=environ, modules=self._modules
        )
        # All settings and files are checked before the first process starts.
        models = self._models(launch, self.checkpoints)
        gateways = [launch.gateway(endpoint, self.checkpoints.target) for endpoint in self.endpoints_of("gateway")]
        for stage in filter(None, (store, models, gateways)):
            self._say(f"starting {', '.join(child.name for child in stage)}")
            await self._supervisor.start(stage, spec.start_timeout_s)

    async def _plan_store(self, work_dir: Path) -> list[ChildSpec]:
        """Sets the store's URL; returns the process of a store of its own, if it is to have one.

        Raises:
            ConfigError: The store that is named does not answer.
        """
        spec = self.spec
        if spec.redis_url is not None:
            async with open_store(spec.redis_url) as store:
                await require(store)
            self.redis_url = spec.redis_url
            self._say(f"using the store at {public_url(spec.redis_url)}")
            return []
        server = find_server(spec.redis_server)
        [endpoint] = self.endpoints_of(STORE)
        self.redis_url = f"redis://{self._announce(endpoint) or endpoint.address}"
        return [store_child(server, spec.host, endpoint.port, work_dir, self._environ)]

    def _models(self, launch: Launch, checkpoints: Checkpoints) -> list[ChildSpec]:
        """Processes of verifiers and drafters.

        Raises:
            ConfigError: A setting or a file of weights is wrong.
        """
        spec = self.spec
        verifier_shares, drafter_shares = share_cpus(spec, available_cpus())
        drafters = enumerate(self.endpoints_of("drafter"))
        placed = [
            *((endpoint, checkpoints.target) for endpoint in self.endpoints_of("verifier")),
            *((endpoint, checkpoints.draft_of(number)) for number, endpoint in drafters),
        ]
        shares = [*verifier_shares, *drafter_shares]
        memory = share_memory(spec, [num_parameters(checkpoint) for _, checkpoint in placed])
        return [
            launch.model(
                endpoint,
                checkpoint,
                share,
                announce=self._announce(endpoint),
                target=checkpoints.target if is_eagle3(checkpoint) else None,
                memory_utilization=utilization,
            )
            for (endpoint, checkpoint), share, utilization in zip(placed, shares, memory, strict=True)
        ]

    def _child(self, role: str) -> Child:
        return self._supervisor.child(self.endpoint(role).name)
