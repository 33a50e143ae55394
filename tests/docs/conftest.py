"""One fleet for all blocks of the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from paceline.cluster.checkpoints import DEMO_TARGET
from tests.docs.blocks import blocks
from tests.docs.demo import Demo
from tests.fleet.conftest import FleetRunner

MODEL = re.compile(r"""model=["']([\w./-]+)["']""")


@pytest.fixture(scope="session")
def demo() -> Iterator[Demo]:
    """A fleet of the demo pair, which also goes by the names that programs in the docs ask for."""
    named = {name for block in blocks() if block.language == "python" for name in MODEL.findall(block.text)}
    aliases = tuple(f"--served-model-name={name}" for name in sorted(named - {DEMO_TARGET.name}))
    with FleetRunner(dtype="float32", gateway_arg=aliases).running() as runner:
        yield Demo(runner)
