"""`paceline up --ray`: a whole fleet on a Ray cluster until Ctrl-C; SIGHUP reads its file again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paceline
from paceline.cluster.fleet_file import READ_ON_RAY, RayFleetSpec, parse_spec, read_fleet_file, read_spec
from paceline.cluster.foreground import describe_models, request_for, say, until_ctrl_c
from paceline.cluster.ray.fleet import RayFleet
from paceline.cluster.spec import gateway_scheme
from paceline.core.errors import ConfigError
from paceline.core.messages import GATEWAY
from paceline.service.config import parse, setting
from paceline.service.process import run

PROG = "paceline up"
DESCRIPTION = (
    "Starts a whole fleet on a Ray cluster as its file says: Ray places and moves gateways, verifiers and drafters, "
    "each a process with its own gRPC server; tokens never pass through Ray. Ctrl-C stops everything; SIGHUP reads "
    "the file again and takes over the numbers of replicas."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayUpConfig:
    """Settings of `paceline up --ray`; all others are in the file."""

    ray: str = setting(help="Address of the Ray cluster, host:port, or auto on one of its hosts.")
    spec: Path | None = setting(None, help="The fleet's file in Ray's words, such as docs/ray/demo.yaml.")
    fleet: Path | None = setting(None, help="Instead: the fleet's file in the words of the Helm chart's values.")

    def __post_init__(self) -> None:
        """Refuses Ray's client protocol: services dial the store on the launcher's host."""
        if "://" in self.ray:
            raise ConfigError(f"--ray must be host:port or auto, on a host of the cluster, got {self.ray!r}")
        if (self.spec is None) == (self.fleet is None):
            raise ConfigError("one of --spec FILE and --fleet FILE is needed, and only one")

    def read(self) -> RayFleetSpec:
        """Reads the file as it is now.

        Raises:
            ConfigError: It cannot be read, or a key or value in it is wrong.
        """
        if self.spec is not None:
            return read_spec(self.spec)
        assert self.fleet is not None, "checked above"
        file = read_fleet_file(self.fleet)
        if unused := file.unused(READ_ON_RAY):
            say(f"not used on Ray: {', '.join(unused)}")
        try:
            return parse_spec(file.on_ray())
        except ConfigError as error:
            raise ConfigError(f"--fleet {self.fleet}, in Ray's words: {error}") from None


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline up --ray`."""
    config = parse(RayUpConfig, argv, os.environ, PROG, DESCRIPTION)
    # Ray reports usage by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    run(serve(config), prog=PROG)


async def serve(config: RayUpConfig) -> None:
    """Runs the fleet until SIGINT or SIGTERM.

    Raises:
        ConfigError: The file, the cluster or a checkpoint makes it impossible.
        UnavailableError: A service was not well in time.
    """
    spec = config.read()

    async def run_fleet(started: asyncio.Event, stop: asyncio.Event) -> None:
        fleet = RayFleet(spec, address=config.ray, environ=os.environ, say=say)
        async with fleet, asyncio.TaskGroup() as tasks:
            started.set()
            say(describe(fleet))
            controllers = [
                tasks.create_task(fleet.follow_lag()),
                tasks.create_task(_resize_on_hangup(fleet, config)),
            ]
            await stop.wait()
            say("stopping: running requests may finish")
            for controller in controllers:
                controller.cancel()

    await until_ctrl_c(run_fleet)


async def _resize_on_hangup(fleet: RayFleet, config: RayUpConfig) -> None:
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, asked.set)
    while True:
        await asked.wait()
        asked.clear()
        try:
            await fleet.resize(config.read())
        except ConfigError as error:
            say(f"not taken over: {error}")


def describe(fleet: RayFleet) -> str:
    """Returns what serves, where the gateways are and a command to try it."""
    assert fleet.checkpoints is not None, "the fleet is not started"
    spec: RayFleetSpec = fleet.spec
    endpoints = [replica.endpoint for replica in fleet.replicas(GATEWAY)]
    urls = [f"{gateway_scheme(spec.services)}://{endpoint.address}" for endpoint in endpoints if endpoint is not None]
    body = request_for(fleet.checkpoints)
    return "\n".join(
        [
            f"Paceline {paceline.__version__} is up on Ray",
            *describe_models(fleet.checkpoints, spec.services.simulate),
            f"gateways      {' '.join(urls)}",
            f"  curl -N {urls[0] if urls else 'URL'}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
            "Ctrl-C stops everything; SIGHUP reads the file again.",
        ]
    )
