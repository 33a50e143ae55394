"""Keeps a replica in the registry while a block runs; if the registry is down, the replica goes on and retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from paceline.core.errors import UnavailableError
from paceline.service.supervision import Supervisor
from paceline.store.base import Replica, Store

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
EXPIRY_S = 5.0


@asynccontextmanager
async def announced(store: Store, replica: Callable[[], Replica], supervisor: Supervisor) -> AsyncIterator[None]:
    """Announces `replica()` every second and withdraws it at the end.

    An older entry of the replica is removed first, with its mark to drain.

    Args:
        store: The registry.
        replica: Describes the replica as it is now.
        supervisor: Keeps the heartbeat going.
    """
    heart = _Heart(store, replica)
    await store.withdraw(replica().replica_id)
    await heart.beat()
    try:
        async with supervisor.kept({"heartbeat": heart.keep_beating}):
            yield
    finally:
        with suppress(UnavailableError):
            await store.withdraw(replica().replica_id)


class _Heart:
    """Announces one replica, and remembers its mark to drain in case the store loses it."""

    def __init__(self, store: Store, replica: Callable[[], Replica]) -> None:
        self._store = store
        self._replica = replica
        self._marked = False
        self._reachable = True

    async def keep_beating(self) -> None:
        """Announces the replica every second; never returns."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self.beat()
            except UnavailableError as error:
                if self._reachable:
                    logger.warning("the registry is away; serving goes on", extra={"reason": str(error)})
                self._reachable = False
            else:
                if not self._reachable:
                    logger.info("the registry is back")
                self._reachable = True

    async def beat(self) -> None:
        """Announces the replica once."""
        self._marked = await self._store.announce(self._replica(), EXPIRY_S, marked=self._marked)
