"""Runs tests/clients in an environment that holds real clients, against fleets of this checkout.

`python -m tests.support.client_suite [pytest's arguments]`. Where the environment cannot be made, one line says why,
and nothing is run.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, FleetSpec
from tests.support.tool_caller import save_tool_caller
from tools.environments import child_environ, environment, known_environment
from tools.processes import CommandFailedError

COMMON: dict[str, Any] = {
    **FREE_PORTS,
    "dtype": "float32",
    "gateway_arg": ("--allowed-origins=https://chat.example.com", "--trust-request-chat-template"),
}
TESTS = Path(__file__).resolve().parents[1] / "clients"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: pytest's, or 0 where the environment cannot be made."""
    try:
        python = environment("clients", os.environ, print)
    except CommandFailedError as error:
        sys.stdout.write(f"no environment for real clients, their tests are skipped: {error}\n")
        return 0
    return asyncio.run(_with_fleets(python, arguments))


async def _with_fleets(python: Path, arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        tool_caller = Path(scratch) / "tool-caller"
        save_tool_caller(tool_caller, DEMO_TARGET)
        demo = FleetSpec(**COMMON, model=DEMO_TARGET, draft_model=DEMO_DRAFTER)
        caller = FleetSpec(**COMMON, model=tool_caller, drafter=False)
        async with (
            LocalFleet(demo, environ=os.environ) as demo_fleet,
            LocalFleet(caller, environ=os.environ) as caller_fleet,
        ):
            told = {
                "PACELINE_CLIENT_SUITE_URL": demo_fleet.gateway_url,
                "PACELINE_CLIENT_SUITE_MODEL": str(DEMO_TARGET),
                "PACELINE_CLIENT_SUITE_CALLER_URL": caller_fleet.gateway_url,
                "PACELINE_CLIENT_SUITE_CALLER_MODEL": str(tool_caller),
                "PACELINE_CLIENT_SUITE_VLLM": str(_vllm() or ""),
                # It asks the network for prices otherwise.
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            }
            command = ["-m", "pytest", "-c", TESTS / "pytest.ini", "--rootdir", TESTS, "--confcutdir", TESTS, TESTS]
            process = await asyncio.create_subprocess_exec(
                python, *command, *arguments, env={**child_environ(os.environ), **told}
            )
            return await process.wait()


def _vllm() -> Path | None:
    """Returns the Python of an environment with vLLM's load client; None: there is none, and none is made for it."""
    known = (known_environment(name, os.environ) for name in ("vllm-bench", "vllm-test", "vllm-cpu"))
    return next((python for python in known if python is not None), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
