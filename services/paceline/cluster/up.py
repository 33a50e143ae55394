"""`paceline up`: a whole fleet on this machine, or on a Ray cluster, until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from functools import partial

import paceline
from paceline.checkpoints.json_files import has_chat_template
from paceline.cluster.checkpoints import Checkpoints, fetch_models
from paceline.cluster.fleet_file import RayTier, check_for_ray, parse_fleet, read_fleet_file
from paceline.cluster.foreground import (
    EXAMPLE_CODE,
    EXAMPLE_QUESTION,
    describe_models,
    request_for,
    say,
    table,
    until_ctrl_c,
)
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FleetSpec, ServicePort, gateway_scheme
from paceline.core.errors import ConfigError
from paceline.core.messages import GATEWAY
from paceline.service.config import as_called, exit_with_error, parse, public_url
from paceline.service.process import run

PROG = "paceline up"
DESCRIPTION = (
    "Starts a whole fleet on this machine (Valkey, verifiers, drafters, gateways), prints where it listens, "
    "restarts what dies and stops everything on Ctrl-C. Without --model it serves the demo pair. With --ray it does "
    "so on a Ray cluster, which places and moves the services; no token passes through Ray."
)


def main(argv: Sequence[str]) -> None:
    try:
        spec, tiers = fleet_settings(argv)
        if spec.ray:
            check_for_ray(spec)
            # Ray reports usage by default.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            run(until_ctrl_c(partial(_run_on_ray, spec, tiers), grace_s=spec.grace_s), prog=PROG)
            return
        # Before the event loop, so that Ctrl-C ends a download.
        spec = fetch_models(spec, say)
    except ConfigError as error:
        exit_with_error(PROG, error)
    run(until_ctrl_c(partial(_run_here, spec), grace_s=spec.grace_s), prog=PROG)


def fleet_settings(argv: Sequence[str]) -> tuple[FleetSpec, Mapping[str, RayTier]]:
    """Reads flags, environment and, below them, the fleet's file.

    Raises:
        ConfigError: The file cannot be read.
    """
    spec = parse(FleetSpec, argv, os.environ, PROG, DESCRIPTION)
    given, tiers = parse_fleet({}, "") if spec.fleet is None else read_fleet_file(spec.fleet)
    return parse(FleetSpec, argv, os.environ, PROG, DESCRIPTION, given=given), tiers


async def _run_here(spec: FleetSpec, started: asyncio.Event, stop: asyncio.Event) -> None:
    async with LocalFleet(spec, environ=os.environ, say=say) as fleet:
        started.set()
        assert fleet.checkpoints is not None, "the fleet is started"
        say(describe(spec, fleet.checkpoints, [fleet.endpoint(GATEWAY)], _places(fleet)))
        await stop.wait()


async def _run_on_ray(
    spec: FleetSpec, tiers: Mapping[str, RayTier], started: asyncio.Event, stop: asyncio.Event
) -> None:
    from paceline.cluster.ray.fleet import ray_fleet

    async with ray_fleet(spec, tiers, environ=os.environ, say=say) as fleet, asyncio.TaskGroup() as tasks:
        started.set()
        follower = tasks.create_task(fleet.follow())
        # Where each replica is has been said when it was well.
        say(describe(spec, fleet.checkpoints, fleet.endpoints(GATEWAY), []))
        await stop.wait()
        follower.cancel()


def describe(spec: FleetSpec, checkpoints: Checkpoints, gateways: Sequence[ServicePort], places: Sequence[str]) -> str:
    """Returns what serves and where, and a command to try it."""
    urls = [f"{gateway_scheme(spec)}://{endpoint.address}" for endpoint in gateways]
    chat = spec.model is not None and has_chat_template(checkpoints.target)
    generate = f"{EXAMPLE_QUESTION!r} --chat" if chat else repr(EXAMPLE_CODE.strip())
    path, body = request_for(checkpoints.target, chat=chat)
    return "\n".join(
        [
            f"Paceline {paceline.__version__} is up{' on Ray' if spec.ray else ''}",
            *describe_models(checkpoints, spec.simulate),
            *(places or [f"gateways      {' '.join(urls)}"]),
            "",
            f"Open {urls[0]}/ in a browser for the console, {urls[0]}/docs for the HTTP API. Try it:",
            f"  curl -N {urls[0]}{path} -H 'Content-Type: application/json' \\",
            f"    -d '{body}'",
            f"  {as_called('paceline generate')} {generate} --url {urls[0]}",
            "",
            "Ctrl-C stops everything.",
        ]
    )


def _places(fleet: LocalFleet) -> list[str]:
    """Where each process listens, and its log."""
    rows = [("service", "pid", "address", "metrics")]
    for endpoint in fleet.endpoints:
        pid = str(fleet.pid(endpoint.name))
        if endpoint.role == GATEWAY:
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
    return [f"logs          {fleet.log_dir}", "", *table(rows)]
