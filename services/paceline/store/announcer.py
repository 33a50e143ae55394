"""Keeps a replica in the registry while a block runs; a registry that is away is waited for, never depended on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from paceline.core.errors import UnavailableError
from paceline.store.base import Replica, Store

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
EXPIRY_S = 5.0


@asynccontextmanager
async def announced(store: Store, replica: Callable[[], Replica]) -> AsyncIterator[None]:
    """Announces `replica()` every second and withdraws it at the end.

    A mark to drain was meant for an earlier life of the replica, and is taken back first.

    Args:
        store: The registry.
        replica: Describes the replica as it is now.
    """
    await store.drain(replica().replica_id, draining=False)
    await store.announce(replica(), EXPIRY_S)
    heart = asyncio.create_task(_beat(store, replica), name="heartbeat")
    try:
        yield
    finally:
        heart.cancel()
        await asyncio.gather(heart, return_exceptions=True)
        with suppress(UnavailableError):
            await store.withdraw(replica().replica_id)


async def _beat(store: Store, replica: Callable[[], Replica]) -> None:
    reachable = True
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        try:
            await store.announce(replica(), EXPIRY_S)
        except Exception as error:  # noqa: BLE001 - a heartbeat that stops for good would take the replica away
            if reachable:
                logger.warning("the registry is away; serving goes on", extra={"reason": str(error)})
            reachable = False
        else:
            if not reachable:
                logger.info("the registry is back")
            reachable = True
