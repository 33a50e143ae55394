"""Runs tests/clients in an environment that holds real clients, against a fleet of this checkout.

`python -m tests.support.client_suite [pytest's arguments]`. Where the environment cannot be made, one line says why,
and nothing is run.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from loadtest.peers.environments import child_environ, environment
from loadtest.peers.processes import CommandFailedError

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, FleetSpec

TESTS = Path(__file__).resolve().parents[1] / "clients"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: pytest's, or 0 where the environment cannot be made."""
    try:
        python = environment("clients", os.environ, print)
    except CommandFailedError as error:
        sys.stdout.write(f"no environment for real clients, their tests are skipped: {error}\n")
        return 0
    return asyncio.run(_with_fleet(python, arguments))


async def _with_fleet(python: Path, arguments: Sequence[str]) -> int:
    spec = FleetSpec(**{**FREE_PORTS, "model": DEMO_TARGET, "draft_model": DEMO_DRAFTER, "dtype": "float32"})
    async with LocalFleet(spec, environ=os.environ) as fleet:
        told = {"PACELINE_CLIENT_SUITE_URL": fleet.gateway_url, "PACELINE_CLIENT_SUITE_MODEL": str(DEMO_TARGET)}
        command = ["-m", "pytest", "-c", TESTS / "pytest.ini", "--rootdir", TESTS, "--confcutdir", TESTS, TESTS]
        process = await asyncio.create_subprocess_exec(
            python, *command, *arguments, env={**child_environ(os.environ), **told}
        )
        return await process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
