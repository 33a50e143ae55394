"""`paceline up`: a whole fleet on this machine until Ctrl-C, with its addresses and a line to try it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial

import paceline
from paceline.cluster.checkpoints import fetch_models
from paceline.cluster.fleet_file import READ, read_fleet_file
from paceline.cluster.foreground import describe_models, request_for, say, table, until_ctrl_c
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FleetSpec, gateway_scheme
from paceline.core.errors import ConfigError
from paceline.service.config import as_called, exit_with_error, parse, public_url
from paceline.service.process import run

PROG = "paceline up"
DESCRIPTION = (
    "Starts a whole fleet on this machine (Valkey, verifiers, drafters, gateways), prints where it listens, "
    "restarts what dies and stops everything on Ctrl-C. Without --model it serves the demo pair. "
    "With --ray ADDRESS and --fleet FILE or --spec FILE it does so on a Ray cluster: paceline up --ray ADDRESS --help."
)
RAY_FLAG, RAY_VARIABLE = "--ray", "PACELINE_RAY"


def main(argv: Sequence[str]) -> None:
    """Entry point of `paceline up`."""
    if os.environ.get(RAY_VARIABLE) or any(argument.partition("=")[0] == RAY_FLAG for argument in argv):
        from paceline.cluster.ray.up import main as up_on_ray

        up_on_ray(argv)
        return
    try:
        # Before the event loop, so that Ctrl-C ends a download.
        spec = fetch_models(fleet_spec(argv), say)
    except ConfigError as error:
        exit_with_error(PROG, error)
    run(serve(spec), prog=PROG)


def fleet_spec(argv: Sequence[str]) -> FleetSpec:
    """Reads flags, environment and, below them, the fleet's file; prints the names of values that are not used here.

    Raises:
        ConfigError: The file cannot be read.
    """
    spec = parse(FleetSpec, argv, os.environ, PROG, DESCRIPTION)
    if spec.fleet is None:
        return spec
    file = read_fleet_file(spec.fleet)
    if unused := file.unused(READ):
        say(f"not used on one machine: {', '.join(unused)}")
    return parse(FleetSpec, argv, os.environ, PROG, DESCRIPTION, given=file.local())


async def serve(spec: FleetSpec) -> None:
    """Runs the fleet until SIGINT or SIGTERM."""
    await until_ctrl_c(partial(_run_fleet, spec))


async def _run_fleet(spec: FleetSpec, started: asyncio.Event, stop: asyncio.Event) -> None:
    async with LocalFleet(spec, environ=os.environ, say=say) as fleet:
        started.set()
        say(describe(fleet))
        await stop.wait()
        say("stopping: running requests may finish")


def describe(fleet: LocalFleet) -> str:
    """Returns where everything listens and a command to try it."""
    assert fleet.checkpoints is not None, "the fleet is not started"
    rows = [("service", "pid", "address", "metrics")]
    for endpoint in fleet.endpoints:
        pid = str(fleet.pid(endpoint.name))
        if endpoint.role == "gateway":
            http = f"{gateway_scheme(fleet.spec)}://{endpoint.address}"
            rows.append((endpoint.name, pid, http, f"{http}/metrics"))
            rows.append(("", "", f"grpc {endpoint.second_address}", ""))
        elif endpoint.role == "valkey":
            rows.append((endpoint.name, pid, endpoint.address, ""))
        else:
            metrics = f"http://{endpoint.second_address}/metrics"
            rows.append((endpoint.name, pid, f"grpc {endpoint.address}", metrics))
    if fleet.spec.redis_url is not None:
        rows.append(("store", "", public_url(fleet.spec.redis_url), ""))
    return "\n".join(
        [
            f"Paceline {paceline.__version__} is up",
            *describe_models(fleet.checkpoints, fleet.spec.simulate),
            f"logs          {fleet.log_dir}",
            "",
            *table(rows),
            "",
            "Try it:",
            f"  curl -N {fleet.gateway_url}/v1/completions -H 'Content-Type: application/json' \\",
            f"    -d '{request_for(fleet.checkpoints)}'",
            f"  {as_called('paceline generate')} 'def read_lines(path):' --url {fleet.gateway_url}",
            "",
            "Ctrl-C stops everything.",
        ]
    )
