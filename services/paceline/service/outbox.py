"""What waits for a peer, bounded in bytes: one that does not read costs no more memory than that, and loses its stream.

A bound on messages is none: a peer that asks for large ones, and reads none of them, would fill the memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Generic, TypeVar

import grpc

from paceline.core.errors import PacelineError

logger = logging.getLogger(__name__)

_PartT = TypeVar("_PartT")


class PeerQueue(Generic[_PartT]):
    """Parts of messages to one peer, in order; belongs to one event loop.

    What is put into an empty queue at once is taken whole, and not counted until the queue is empty again: when a
    stream comes up, all its sessions are opened with all their tokens.

    Args:
        most_bytes: That may wait.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._parts: deque[tuple[_PartT, int]] = deque()
        self._num_bytes = 0
        # Bytes that were put into the empty queue.
        self._first_bytes = 0
        self._error: PacelineError | None = None
        self._ready = asyncio.Event()

    def put(self, parts: Sequence[tuple[_PartT, int]]) -> None:
        """Adds parts and their bytes.

        Raises:
            asyncio.QueueFull: The peer does not read; nothing was added.
        """
        num_bytes = sum(size for _, size in parts)
        if not self._parts:
            self._first_bytes = num_bytes
        if self._num_bytes + num_bytes > self._most_bytes + self._first_bytes:
            raise asyncio.QueueFull
        self._parts.extend(parts)
        self._num_bytes += num_bytes
        if parts:
            self._ready.set()

    def fail(self, error: PacelineError) -> None:
        """Drops what waits; whoever gets from the queue gets the error."""
        self._parts.clear()
        self._num_bytes, self._error = 0, error
        self._ready.set()

    async def get(self) -> _PartT:
        """Returns the next part, once there is one.

        Raises:
            PacelineError: See `fail`.
        """
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        part, num_bytes = self._parts.popleft()
        self._num_bytes -= num_bytes
        if not self._parts:
            self._ready.clear()
        return part


@asynccontextmanager
async def sending(call: Any, messages: AsyncIterator[Any]) -> AsyncIterator[None]:
    """Writes messages to a gRPC stream while a block runs; where they cannot be written, reading says why.

    gRPC leaves the messages that a call gets as an iterator, and its task for them, to the garbage collector when the
    peer refuses the stream, and asyncio logs errors of both.

    Args:
        call: A `grpc.aio` call that was made without messages.
        messages: Closed at the end.
    """

    async def write() -> None:
        try:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                async with aclosing(messages):  # type: ignore[type-var]  # a generator
                    async for message in messages:
                        await call.write(message)
        finally:
            call.cancel()

    writing = asyncio.create_task(write(), name="messages to a peer")
    try:
        yield
    finally:
        writing.cancel()
        (ended,) = await asyncio.gather(writing, return_exceptions=True)
        if isinstance(ended, Exception):
            logger.error("messages to a peer could not be made", exc_info=ended)
