"""A real fleet of processes, the demo pair in float32 unless told otherwise, that tests of any kind can use."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from paceline.cluster.checkpoints import DEMO_DRAFTER, DEMO_TARGET
from paceline.cluster.local import LocalFleet
from paceline.cluster.spec import FREE_PORTS, FleetSpec


class FleetRunner:
    """A fleet supervised by a loop in a thread of its own, so that tests of any kind can use it."""

    def __init__(self, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        spec = FleetSpec(
            **{**FREE_PORTS, "model": DEMO_TARGET, "draft_model": DEMO_DRAFTER, "dtype": "float32", **settings}
        )
        self.fleet = LocalFleet(spec, environ=os.environ)

    @contextmanager
    def running(self) -> Iterator[FleetRunner]:
        """Starts the fleet and stops it at the end."""
        self._thread.start()
        try:
            self.call(self.fleet.__aenter__(), 300)
            try:
                yield self
            finally:
                self.call(self.fleet.stop(), 60)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def call(self, coroutine: Any, timeout_s: float = 60) -> Any:
        """Runs a coroutine in the fleet's loop."""
        future: Future[Any] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        return future.result(timeout_s)

    @property
    def url(self) -> str:
        """Where the gateway serves."""
        return self.fleet.gateway_url
