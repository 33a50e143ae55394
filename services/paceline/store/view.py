"""The registry as one reader knows it: read in the background, and still there when the registry is not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from paceline.core.errors import UnavailableError
from paceline.store.base import Replica

# A registry that came back empty fills up within a few heartbeats; until then old entries are better.
RECOVERY_S = 10.0

_log = logging.getLogger(__name__)


class Registry(Protocol):
    """The part of the store that is needed here."""

    async def replicas(self, role: str | None = None) -> list[Replica]:
        """Returns the replicas alive; raises `UnavailableError` when the registry does not answer."""


def after_recovery(known: Sequence[Replica], found: Sequence[Replica]) -> list[Replica]:
    """Returns what is found, and what was known and may only not have come back yet."""
    found_ids = {replica.replica_id for replica in found}
    return [*found, *(replica for replica in known if replica.replica_id not in found_ids)]


class RegistryView:
    """Replicas as last read.

    Args:
        registry: Where replicas announce themselves.
        role: Only these; None: all.
        clock: Monotonic seconds.

    Attributes:
        replicas: None of them before the first `refresh`.
        error: Why the last reading failed; None if it did not.
    """

    def __init__(
        self, registry: Registry, role: str | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.replicas: tuple[Replica, ...] = ()
        self.error: str | None = None
        self._registry = registry
        self._role = role
        self._clock = clock
        self._failed_s: float | None = None

    async def refresh(self) -> None:
        """Reads the registry once; a failure leaves the last known replicas in place."""
        try:
            found = await self._registry.replicas(self._role)
        except UnavailableError as error:
            if self.error is None:
                _log.warning("registry unreachable, going on with the last known replicas", extra={"error": error})
            self.error = str(error)
            self._failed_s = self._clock()
            return
        if self.error is not None:
            _log.info("registry reachable again")
            self.error = None
        if self._failed_s is not None and self._clock() - self._failed_s < RECOVERY_S:
            found = after_recovery(self.replicas, found)
        self.replicas = tuple(found)

    async def keep_fresh(self, interval_s: float) -> None:
        """Refreshes for ever, with a pause of so many seconds."""
        while True:
            await self.refresh()
            await asyncio.sleep(interval_s)
