"""What the blocks of the docs are sent to."""

from __future__ import annotations

import pytest

from tests.docs.demo import Demo
from tests.support.fleet_runner import FleetRunner


@pytest.fixture(scope="session")
def demo(trees: FleetRunner) -> Demo:
    """The fleet that other tests use too."""
    return Demo(trees)
