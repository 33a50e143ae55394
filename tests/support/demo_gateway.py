"""A real gateway before real verifiers of the demo model, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from paceline.cluster.checkpoints import DEMO_TARGET
from paceline.core.messages import VERIFIER
from paceline.engine.grammar import Grammars
from paceline.engine.loading import model_identity
from paceline.gateway.text.codec import TextCodec
from paceline.store.base import Replica
from paceline.verifier.verifier_host import TargetHost
from tests.integration.conftest import verifier_at
from tests.support.memory_store import MemoryStore
from tests.support.poison import Poison
from tests.support.scripted_fleet import start_gateway

# Long enough to be killed within an answer.
STEP_S = 0.01


@asynccontextmanager
async def demo_gateway(**settings: Any) -> AsyncIterator[str]:
    """Starts both; yields the URL of the HTTP door. `settings` are fields of `GatewayConfig`."""
    async with _demo_fleet(1, None, settings) as (url, _):
        yield url


@asynccontextmanager
async def mortal_gateway(**settings: Any) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """Starts two verifiers; yields the URL, and what ends the one that is at work."""
    async with _demo_fleet(2, Poison(step_s=STEP_S, deadly=False), settings) as started:
        yield started


@asynccontextmanager
async def _demo_fleet(
    num_verifiers: int, poison: Poison | None, settings: dict[str, Any]
) -> AsyncIterator[tuple[str, Callable[[], Awaitable[None]]]]:
    known = model_identity(DEMO_TARGET)
    grammars = Grammars(DEMO_TARGET, known.vocab_size, known.eos_token_ids)
    store, lives = MemoryStore(), list[tuple[TargetHost, AsyncExitStack]]()
    async with AsyncExitStack() as all_lives:
        for number in range(num_verifiers):
            life = await all_lives.enter_async_context(AsyncExitStack())
            verifier = verifier_at(DEMO_TARGET, grammars=grammars, poison=poison)
            address, host = await life.enter_async_context(verifier)
            identity = host.identity
            replica = Replica(
                replica_id=f"demo-{number}", role=VERIFIER, address=address, identity=identity, max_sessions=8
            )
            await store.announce(replica, 3600)
            lives.append((host, life))
        stop = asyncio.Event()
        gateway, addresses = await start_gateway(TextCodec.from_folder(DEMO_TARGET), store, stop, settings)

        async def kill() -> None:
            [busy] = [life for host, life in lives if host.num_sessions]
            await busy.aclose()

        try:
            yield f"http://{addresses.http}", kill
        finally:
            stop.set()
            await gateway
