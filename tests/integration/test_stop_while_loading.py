"""A service that is told to go while it loads goes at once, also where signals it did not ask for are ignored."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# The first process of a container ignores SIGTERM unless it has asked for it; this one is made to.
LOADING = """
import asyncio, signal
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from paceline.model_service import serve_model
from paceline.verifier.config import VerifierConfig

class Engine:
    async def start(self):
        print("loading", flush=True)
        await asyncio.sleep(60)

class Loading:
    engine = Engine()

    def announced_at(self, address):
        pass

    async def close(self):
        pass

signal.signal(signal.SIGTERM, signal.SIG_IGN)
config = VerifierConfig(model=Path("anything"), port=0, metrics_port=0, redis_url="memory://")
service = {"role": "verifier", "service_name": "x", "add_servicer": lambda _: None, "registry": CollectorRegistry()}
asyncio.run(serve_model(Loading(), config, **service))
"""


@pytest.mark.full
def test_a_service_that_loads_goes_when_it_is_told_to() -> None:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "services")}
    with subprocess.Popen([sys.executable, "-c", LOADING], stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
