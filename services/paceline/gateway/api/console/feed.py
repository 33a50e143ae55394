"""The live figures: one task reads the services' metrics while somebody watches, and tells all who do.

Viewers cost the fleet nothing beyond that one task; one that reads slowly loses the oldest frames, and nobody waits
for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

from paceline.core.errors import OverloadedError, UnavailableError
from paceline.core.messages import GATEWAY
from paceline.gateway.api.console.figures import Json, Reading
from paceline.gateway.api.console.frames import Look, OwnCounts, frame
from paceline.gateway.api.console.reader import Read, metrics_reader
from paceline.store.base import Replica

INTERVAL_S = 1.0
# Figures are taken over so many intervals, so that they can be read, and still follow what happens.
WINDOW_LOOKS = 3
MAX_VIEWERS = 32
# Frames that a viewer may be behind.
MAX_WAITING_FRAMES = 4
# Of larger fleets the rest is shown without figures.
MAX_READ_REPLICAS = 256
MAX_READS_AT_ONCE = 16

_log = logging.getLogger(__name__)

# None: there will be no more.
Frames = asyncio.Queue[Json | None]


class ConsoleFeed:
    """Frames of the console for a bounded number of viewers.

    Args:
        replicas: The fleet as the registry has it.
        own_counts: What this gateway knows of itself.
        open_reader: Opens what reads replicas' metrics, for as long as somebody watches.
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
        self._viewers: set[Frames] = set()
        self._polling: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def num_viewers(self) -> int:
        """Who watches now."""
        return len(self._viewers)

    @property
    def polling(self) -> bool:
        """Whether metrics are read."""
        return self._polling is not None

    @contextmanager
    def watching(self) -> Iterator[Frames]:
        """Counts as a viewer while a block runs; the queue yields frames, and None when there will be no more.

        Raises:
            OverloadedError: There are too many viewers.
            UnavailableError: The gateway is shutting down.
        """
        if self._closed:
            raise UnavailableError("the gateway is shutting down")
        if self.num_viewers >= MAX_VIEWERS:
            raise OverloadedError(f"{MAX_VIEWERS} viewers watch this console, no more may", retry_after_s=10.0)
        frames: Frames = asyncio.Queue(MAX_WAITING_FRAMES)
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
        """Sends all viewers home; later ones are refused."""
        self._closed = True
        self._tell(None)
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
                    self._tell(frame(looks[0] if looks else None, now))
                    looks.append(now)
                    await asyncio.sleep(self._interval_s)
        except Exception:  # noqa: BLE001 - a fault of the figures is told in the log, and ends nothing else
            _log.exception("the console's figures have ended")
            self._polling = None
            self._tell(None)

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

    def _tell(self, told: Json | None) -> None:
        for frames in self._viewers:
            if frames.full():
                frames.get_nowait()
            frames.put_nowait(told)


@asynccontextmanager
async def closed_at_end(feed: ConsoleFeed | None) -> AsyncIterator[None]:
    """Closes a feed, if there is one, at the end of a block."""
    try:
        yield
    finally:
        if feed is not None:
            await feed.close()
