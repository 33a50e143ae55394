"""A real gateway before a real verifier of the demo model, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.core.messages import VERIFIER
from paceline.engine.grammar import Grammars
from paceline.engine.identity import model_identity
from paceline.gateway.text import TextCodec
from paceline.store.base import Replica
from paceline.store.memory import MemoryStore
from tests.integration.conftest import verifier_at
from tests.support.scripted_fleet import start_gateway


@asynccontextmanager
async def demo_gateway(**settings: Any) -> AsyncIterator[str]:
    """Starts both; yields the URL of the HTTP door. `settings` are fields of `GatewayConfig`."""
    known = model_identity(DEMO_TARGET)
    grammars = Grammars(DEMO_TARGET, known.vocab_size, known.eos_token_ids)
    async with verifier_at(DEMO_TARGET, grammars=grammars) as (address, host):
        store = MemoryStore()
        replica = Replica(replica_id="demo", role=VERIFIER, address=address, identity=host.identity, max_sessions=8)
        await store.announce(replica, 3600)
        stop = asyncio.Event()
        gateway, addresses = await start_gateway(TextCodec.from_folder(DEMO_TARGET), store, stop, settings)
        try:
            yield f"http://{addresses.http}"
        finally:
            stop.set()
            await gateway
