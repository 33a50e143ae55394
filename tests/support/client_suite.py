"""Runs tests/clients in an environment that holds real clients, against fleets of this checkout.

`python -m tests.support.client_suite [pytest's arguments]`. Where the environment cannot be made, one line says why,
and nothing is run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, FleetSpec
from tests.support.agent_models import FAMILIES, save_agent
from tests.support.tool_caller import save_tool_caller
from tools.environments import child_environ, environment, known_environment
from tools.processes import CommandFailedError

COMMON: dict[str, Any] = {**FREE_PORTS, "dtype": "float32"}
DRAFTS_ITSELF = json.dumps({"method": "draft_model", "placement": "verifier"})
AGENT_MEMORY = 0.05
TESTS = Path(__file__).resolve().parents[1] / "clients"


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: pytest's, or 0 where the environment cannot be made."""
    try:
        python = environment("clients", os.environ, print)
    except CommandFailedError as error:
        sys.stdout.write(f"no environment for real clients, their tests are skipped: {error}\n")
        return 0
    return asyncio.run(_with_fleets(python, arguments))


def _specs(scratch: Path) -> dict[str, FleetSpec]:
    """Returns the fleets: the demo pair, alone with one place, a model that calls tools, an agent of each family."""
    tool_caller = scratch / "tool-caller"
    save_tool_caller(tool_caller, DEMO_TARGET)
    for name, family in FAMILIES.items():
        save_agent(scratch / name, DEMO_TARGET, family)
    agents = {
        name: FleetSpec(
            **COMMON,
            model=scratch / name,
            draft_model=scratch / name,
            drafter=False,
            speculative_config=DRAFTS_ITSELF,
            memory_utilization=AGENT_MEMORY,
            # Threads of several fleets would wait for one another on few cores.
            verifier_threads=1,
        )
        for name in FAMILIES
    }
    return {
        "demo": FleetSpec(**COMMON, model=DEMO_TARGET, draft_model=DEMO_DRAFTER),
        "queued": FleetSpec(
            **COMMON,
            model=DEMO_TARGET,
            drafter=False,
            verifier_arg=("--max-num-seqs=1",),
            gateway_arg=("--stream-ping-s=0.1",),
            verifier_threads=1,
        ),
        "caller": FleetSpec(**COMMON, model=tool_caller, drafter=False),
        **agents,
    }


async def _with_fleets(python: Path, arguments: Sequence[str]) -> int:
    async with AsyncExitStack() as stack:
        specs = _specs(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        # Verifiers that rehearse would leave clients little of the cores.
        environ = {**os.environ, "PACELINE_REHEARSE": "off"}
        fleets = [LocalFleet(spec, environ=environ) for spec in specs.values()]
        # The first one alone: it compiles what all others then find compiled.
        await stack.enter_async_context(fleets[0])
        await asyncio.gather(*(stack.enter_async_context(fleet) for fleet in fleets[1:]))
        served = {
            name: {
                "url": fleet.gateway_url,
                "grpc": fleet.endpoint("gateway").second_address,
                "model": str(spec.model),
            }
            for (name, spec), fleet in zip(specs.items(), fleets, strict=True)
        }
        command = ["-m", "pytest", "-c", TESTS / "pytest.ini", "--rootdir", TESTS, "--confcutdir", TESTS, TESTS]
        process = await asyncio.create_subprocess_exec(python, *command, *arguments, env=_environ(served))
        return await process.wait()


def _environ(served: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    return {
        **child_environ(os.environ),
        "PACELINE_CLIENT_SUITE_SERVED": json.dumps(served),
        "PACELINE_CLIENT_SUITE_VLLM": str(_vllm() or ""),
        # It asks the network for prices otherwise.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }


def _vllm() -> Path | None:
    """Returns the Python of an environment with vLLM's load client; None: there is none, and none is made for it."""
    known = (known_environment(name, os.environ) for name in ("vllm-bench", "vllm-test", "vllm-cpu"))
    return next((python for python in known if python is not None), None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
