"""Sends bad messages to the doors of a fleet and returns the status of each answer. It judges nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Protocol

import grpc

from loadtest.bad.kinds import Bad

ANSWER_S = 60.0
# Stands for a status when there was no answer.
NO_ANSWER = "no answer"
# Stands for a 400 that does not say what it refuses.
NAMELESS = "400 without a name"
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_send_message_length", -1),
    # Channels of their own: gRPC would put all to one address on one connection.
    ("grpc.use_local_subchannel_pool", 1),
)


class Door(Protocol):
    """A way into a fleet."""

    async def send(self, bad: Bad) -> str:
        """Sends it, reads the answer to its end, and returns the status; `NO_ANSWER` if there was none."""

    async def close(self) -> None:
        """Closes connections."""


class HttpDoor:
    """An HTTP connection, opened again when the gateway has closed it."""

    def __init__(self, address: str) -> None:
        host, _, self._port = address.rpartition(":")
        self._host = host.strip("[]")
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, bad: Bad) -> str:
        """Sends one request."""
        try:
            async with asyncio.timeout(ANSWER_S):
                status, body = await self._exchange(bad.parts[0])
        except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            await self.close()
            return NO_ANSWER
        nameless = status == "400" and not re.search(bad.kind.names, body.decode("utf-8", "replace"))
        return NAMELESS if nameless else status

    async def _exchange(self, request: bytes) -> tuple[str, bytes]:
        """Returns the status and the body of the answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, int(self._port))
        reader, writer = self._streams
        writer.write(request)
        await writer.drain()
        status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        if "content-length" in headers:
            body = await reader.readexactly(int(headers["content-length"]))
        else:
            body = await reader.read()
        if headers.get("connection") == "close" or "content-length" not in headers:
            await self.close()
        return status.split()[1], body

    async def close(self) -> None:
        """Closes the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class GrpcDoor:
    """Calls of one message or several, each in a thread, over a channel of its own.

    Where a service ends a call while there is still something to write, gRPC's asyncio client puts an error of its own
    in the place of the service's status; the one for threads does not.
    """

    def __init__(self, address: str, executor: ThreadPoolExecutor) -> None:
        self._channel = grpc.insecure_channel(address, options=_OPTIONS)
        self._executor = executor

    async def send(self, bad: Bad) -> str:
        """Makes one call."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._call, bad)

    def _call(self, bad: Bad) -> str:
        ended = Event()

        def messages() -> Iterator[bytes]:
            yield from bad.parts
            if bad.kind.ends_call:
                ended.wait()

        call = self._channel.stream_stream(bad.kind.method, None, None)(messages(), timeout=ANSWER_S)
        refusal = ""
        try:
            for answer in call:
                refusal = refusal or bad.kind.refusal(answer)
        except grpc.RpcError:
            pass
        finally:
            ended.set()
        code = call.code()
        return NO_ANSWER if code is grpc.StatusCode.DEADLINE_EXCEEDED else refusal or str(code.name)

    async def close(self) -> None:
        """Closes the channel."""
        self._channel.close()


async def send_all(doors: Sequence[Door], messages: Iterator[Bad], on_answer: Callable[[Bad, str], None]) -> None:
    """Sends messages, as many at a time as there are doors, and closes the doors.

    Args:
        doors: Ways into the same service.
        messages: Messages to send.
        on_answer: Called with every message and its answer's status.
    """

    async def work(door: Door) -> None:
        for bad in messages:
            on_answer(bad, await door.send(bad))

    try:
        await asyncio.gather(*map(work, doors))
    finally:
        await asyncio.gather(*(door.close() for door in doors))
