"""Settings and whole fleets of all tests: these machines are shared, so no test is judged by its time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support.groups import check_groups

if TYPE_CHECKING:
    from tests.support.fleet_runner import FleetRunner
    from tests.support.group_scheduling import GroupScheduling

# What the verifiers of one test learn must not reach those of another.
os.environ["PACELINE_LEARNED_DIR"] = "none"
# A fleet that nobody asks anything would take the time of others.
os.environ["PACELINE_REHEARSE"] = "off"
# There is a worker for each core, and threads beyond that would spin while they wait for one another.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
if not Path("/dev/nvidiactl").exists():
    # Triton looks at this when it is imported, and torch may do that in any test: `unit/engine/cuda/interpreted.py`.
    os.environ["TRITON_INTERPRET"] = "1"
settings.register_profile("paceline", deadline=None, print_blob=True, derandomize=bool(os.environ.get("CI")))
settings.load_profile("paceline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    check_groups(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    from tests.support.group_scheduling import GroupScheduling

    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a random target and of a drafter that resembles it; whoever changes them makes a copy first."""
    from tests.support.checkpoints import save_pair

    return save_pair(tmp_path_factory.mktemp("tiny-pair"))


@pytest.fixture(scope="session")
def trees() -> Iterator[FleetRunner]:
    """The demo pair: its drafter grows trees, four nodes are verified, and the docs' names for models lead to it."""
    from tests.docs.blocks import models_asked_for
    from tests.support.fleet_runner import FleetRunner

    settings = {
        # By default no draft would be verified: at this size it saves no time.
        "speculative_config": '{"method": "draft_model+ngram", "num_speculative_tokens": 4, "policy": "fixed"}',
        "gateway_arg": tuple(f"--served-model-name={name}" for name in models_asked_for()),
        # Nothing is measured, and a drafter at idle priority may starve where other tests run.
        "pin": False,
        "lend": False,
    }
    with FleetRunner(**settings).running() as runner:
        yield runner


@pytest.fixture(scope="session")
def chains() -> Iterator[FleetRunner]:
    """The demo pair: its drafter grows chains, and eight nodes are verified whatever the load."""
    from tests.support.fleet_runner import FleetRunner

    settings = {
        "drafter_arg": ("--draft-width=1",),
        "speculative_config": '{"method": "draft_model", "num_speculative_tokens": 8, "policy": "fixed"}',
    }
    with FleetRunner(**settings).running() as runner:
        yield runner
