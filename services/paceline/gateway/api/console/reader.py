"""Reads the metrics that replicas announce, over plain HTTP, within bounds of time and size."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial

import httpx

from paceline.gateway.api.console.figures import Reading, read_page
from paceline.service.config import is_address
from paceline.store.base import Replica

# A page that takes longer, or is longer, is none.
READ_TIMEOUT_S = 2.0
MAX_PAGE_BYTES = 4 * 1024 * 1024

# One replica's metrics; None where they cannot be had.
Read = Callable[[Replica], Awaitable[Reading | None]]


@asynccontextmanager
async def metrics_reader(clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Read]:
    """Yields what reads metrics; connections are kept until the end of the block.

    Args:
        clock: Monotonic seconds.
    """
    # Redirects are not followed: the registry names the only places that are read. No certificates are looked at.
    async with httpx.AsyncClient(
        trust_env=False, verify=False, timeout=READ_TIMEOUT_S, headers={"accept-encoding": "identity"}
    ) as client:
        yield partial(_read, client, clock)


async def _read(client: httpx.AsyncClient, clock: Callable[[], float], replica: Replica) -> Reading | None:
    if not is_address(replica.metrics_address):
        return None
    with suppress(httpx.HTTPError, TimeoutError, ValueError):
        async with asyncio.timeout(READ_TIMEOUT_S):
            page = await _page(client, f"http://{replica.metrics_address}/metrics")
        return read_page(page.decode(), clock())
    return None


async def _page(client: httpx.AsyncClient, url: str) -> bytes:
    """Returns the body of a page.

    Raises:
        httpx.HTTPError: It is not to be had.
        ValueError: It is too large.
    """
    page = bytearray()
    async with client.stream("GET", url) as response:
        response.raise_for_status()
        async for part in response.aiter_raw():
            page += part
            if len(page) > MAX_PAGE_BYTES:
                raise ValueError(f"{url} holds more than {MAX_PAGE_BYTES} bytes")
    return bytes(page)
