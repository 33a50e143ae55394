"""Outbox for a peer, bounded in bytes: a peer that does not read costs no more memory, and loses its stream.

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


class WaitingBytes:
    """Counts the bytes that wait for a peer.

    A message to an empty outbox is taken whole, and not counted until the outbox is empty again:
    when a stream comes up, all its sessions are opened with all their tokens.

    Args:
        most_bytes: Bytes that may wait.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._num_bytes = self._first_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes that wait now.

        Raises:
            asyncio.QueueFull: The peer does not read; nothing was counted.
        """
        if not self._num_bytes:
            self._first_bytes = num_bytes
        if self._num_bytes + num_bytes > self.most_bytes + self._first_bytes:
            raise asyncio.QueueFull
        self._num_bytes += num_bytes

    def remove(self, num_bytes: int) -> None:
        """Counts bytes that wait no more."""
        self._num_bytes -= num_bytes


class Outbox(Generic[_PartT]):
    """Parts of messages to one peer, in order; belongs to one event loop.

    Args:
        most_bytes: Bytes that may wait; see `WaitingBytes`.
    """

    def __init__(self, most_bytes: int) -> None:
        self.waiting = WaitingBytes(most_bytes)
        self._parts: deque[tuple[_PartT, int]] = deque()
        self._error: PacelineError | None = None
        self._ready = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._parts)

    def put(self, parts: Sequence[tuple[_PartT, int]]) -> None:
        """Adds parts and their bytes.

        Raises:
            asyncio.QueueFull: The peer does not read; nothing was added.
        """
        self.waiting.add(sum(size for _, size in parts))
        self._parts.extend(parts)
        if parts:
            self._ready.set()

    def clear(self) -> None:
        """Drops what waits."""
        while self._parts:
            self.take()

    def fail(self, error: PacelineError) -> None:
        """Drops what waits; `get` raises the error from now on."""
        self.clear()
        self._error = error
        self._ready.set()

    def take(self) -> _PartT:
        """Returns the next part; there is one."""
        part, num_bytes = self._parts.popleft()
        self.waiting.remove(num_bytes)
        if not self._parts:
            self._ready.clear()
        return part

    async def get(self) -> _PartT:
        """Returns the next part, once there is one.

        Raises:
            PacelineError: See `fail`.
        """
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        return self.take()


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
