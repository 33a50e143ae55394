"""Which tests run in one worker: those of a file, and all that may use a whole fleet; so what is shared starts once."""

from __future__ import annotations

import pytest

FLEETS = {"trees", "chains"}
FILES_WITH_FLEETS = (
    "tests/docs/",
    "tests/fleet/test_prometheus.py",
    "tests/fleet/test_promises.py",
    "tests/integration/test_console.py",
)


def group_of(nodeid: str) -> str:
    """Names the tests that a test runs in one worker with."""
    return "fleet" if nodeid.startswith(FILES_WITH_FLEETS) else nodeid.partition("::")[0]


def check_groups(items: list[pytest.Item]) -> None:
    """Refuses a test that uses a shared fleet in a file that this module does not know."""
    for item in items:
        if FLEETS & {*getattr(item, "fixturenames", ()), *_by_parameter(item)} and group_of(item.nodeid) != "fleet":
            raise pytest.UsageError(f"{item.nodeid} uses a shared fleet: name its file in tests/support/groups.py")


def _by_parameter(item: pytest.Item) -> set[object]:
    """Fleets that a test gets by a parameter."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return {params.get("fleet_name")}
