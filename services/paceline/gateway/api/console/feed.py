"""The live figures: while there are viewers, one task reads the services' metrics and sends frames to all of them.

Viewers cost the fleet nothing beyond that one task. A viewer that reads slowly loses the oldest frames and delays
nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from functools import partial

import httpx

from paceline.core.addresses import is_address
from paceline.core.errors import UnavailableError
from paceline.core.messages import GATEWAY
from paceline.gateway.access.callers import current_caller
from paceline.gateway.access.fair_shares import Shares
from paceline.gateway.api.console.figures import Json, Reading, read_page
from paceline.gateway.api.console.frames import Look, OwnCounts, frame
from paceline.store.base import Replica

INTERVAL_S = 1.0
# Figures are averaged over this number of intervals: few enough to follow changes, enough to be readable.
WINDOW_LOOKS = 3
MAX_VIEWERS = 32
# Frames that a viewer may be behind.
MAX_WAITING_FRAMES = 4
# The rest of a larger fleet is shown without figures.
MAX_READ_REPLICAS = 256
MAX_READS_AT_ONCE = 16
# A page that takes longer, or is longer, counts as missing.
READ_TIMEOUT_S = 2.0
MAX_PAGE_BYTES = 4 * 1024 * 1024

_log = logging.getLogger(__name__)

# Returns one replica's metrics; None if they cannot be read.
Read = Callable[[Replica], Awaitable[Reading | None]]
# None: there will be no more.
Frames = asyncio.Queue[Json | None]


@asynccontextmanager
async def metrics_reader(clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Read]:
    """Yields a reader of metrics; it keeps its connections until the end of the block.

    Args:
        clock: Monotonic seconds.
    """
    # Redirects are not followed, so that only addresses of the registry are read. Certificates are not checked.
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
        httpx.HTTPError: It cannot be fetched.
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


class ConsoleFeed:
    """Frames of the console for a bounded number of viewers.

    Args:
        replicas: The fleet as the registry has it.
        own_counts: This gateway's own figures.
        open_reader: Opens the reader of replicas' metrics, as long as there are viewers.
        interval_s: Pause between two frames.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        replicas: Callable[[], Sequence[Replica]],
        own_counts: Callable[[], OwnCounts],
        *,
        open_reader: Callable[[], AbstractAsyncContextManager[Read]] = metrics_reader,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._own_counts = own_counts
        self._open_reader = open_reader
        self._interval_s = interval_s
        self._clock = clock
        self._places = Shares(MAX_VIEWERS, "viewers of this console")
        self._viewers: set[Frames] = set()
        self._polling: asyncio.Task[None] | None = None
        self._closed = False

    @contextmanager
    def watching(self) -> Iterator[Frames]:
        """Counts as a viewer while a block runs; the queue yields frames, and None when there will be no more.

        Raises:
            OverloadedError: There are too many viewers, or too many with the same key.
            UnavailableError: The gateway is shutting down.
        """
        if self._closed:
            raise UnavailableError("the gateway is shutting down")
        frames: Frames = asyncio.Queue(MAX_WAITING_FRAMES)
        with self._places.take(1, current_caller()):
            self._viewers.add(frames)
            if self._polling is None:
                self._polling = asyncio.create_task(self._poll(), name="console")
            try:
                yield frames
            finally:
                self._viewers.discard(frames)
                if not self._viewers:
                    self._stop_polling()

    async def close(self) -> None:
        """Ends the streams of all viewers and refuses later ones."""
        self._closed = True
        self._send(None)
        polling = self._polling
        self._stop_polling()
        if polling is not None:
            await asyncio.gather(polling, return_exceptions=True)

    def _stop_polling(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None

    async def _poll(self) -> None:
        looks: deque[Look] = deque(maxlen=WINDOW_LOOKS)
        try:
            async with self._open_reader() as read:
                while True:
                    now = await self._look(read)
                    self._send(frame(looks[0] if looks else None, now))
                    looks.append(now)
                    await asyncio.sleep(self._interval_s)
        except Exception:  # noqa: BLE001 - a fault of the figures is logged, and ends nothing else
            _log.exception("the console's figures have ended")
            self._polling = None
            self._send(None)

    async def _look(self, read: Read) -> Look:
        replicas = list(self._replicas())
        gate = asyncio.Semaphore(MAX_READS_AT_ONCE)

        async def in_turn(replica: Replica) -> Reading | None:
            async with gate:
                return await read(replica)

        readable = [each for each in replicas if each.role != GATEWAY and each.metrics_address][:MAX_READ_REPLICAS]
        readings = await asyncio.gather(*map(in_turn, readable))
        return Look(
            taken_s=self._clock(),
            replicas=replicas,
            readings={
                each.replica_id: reading
                for each, reading in zip(readable, readings, strict=True)
                if reading is not None
            },
            own=self._own_counts(),
        )

    def _send(self, item: Json | None) -> None:
        for frames in self._viewers:
            if frames.full():
                frames.get_nowait()
            frames.put_nowait(item)


@asynccontextmanager
async def closed_at_end(feed: ConsoleFeed | None) -> AsyncIterator[None]:
    """Closes a feed, if there is one, at the end of a block."""
    try:
        yield
    finally:
        if feed is not None:
            await feed.close()
