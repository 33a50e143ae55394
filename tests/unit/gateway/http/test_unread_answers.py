"""Clients that do not read what they asked for: their connections end, whatever is sent, and those who read go on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.gateway import doors
from paceline.gateway.config import GatewayConfig
from paceline.gateway.http import connection
from paceline.gateway.http.response import STREAM_HEADERS, Exchange, until_disconnect

# More than the buffers of any system hold.
LARGE = 32 * 1024 * 1024
GET = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"


class Answers:
    """Answers with a large body at once, or with a stream without an end; notes what has ended."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.begun.append(scope["path"])
        exchange = Exchange(send)
        try:
            await until_disconnect(receive, self.endless(exchange) if scope["path"] == "/stream" else large(exchange))
        finally:
            self.ended.put_nowait(scope["path"])

    async def endless(self, exchange: Exchange) -> None:
        await exchange.begin(200, STREAM_HEADERS)
        while True:
            await exchange.write(bytes(64 * 1024))
            # Nothing is sent, or waited for, once the client is gone.
            await asyncio.sleep(0)


async def large(exchange: Exchange) -> None:
    await exchange.begin(200, {"content-length": str(LARGE)})
    await exchange.write(bytes(LARGE), last=True)


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a door with an application behind it; what the client does not read stays at the server."""
    config = GatewayConfig(model=())
    with doors.listening_socket("127.0.0.1", 0) as listener:
        async with doors._http_server(config, app, listener, 8, None):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
            reader, writer = await asyncio.open_connection(sock=client, limit=4096)
            try:
                yield reader, writer
            finally:
                writer.transport.abort()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SEND_TIMEOUT_S", 0.2)


async def is_cut_off(reader: asyncio.StreamReader) -> bool:
    """Whether the connection ends before the large answer does."""
    num_bytes = 0
    try:
        while part := await reader.read(1 << 20):
            num_bytes += len(part)
    except ConnectionError:
        pass
    return num_bytes < LARGE


async def test_a_stream_behind_an_answer_that_is_not_read_ends() -> None:
    """Its first part had no deadline: sessions were held for as long as the socket was open."""
    answers = Answers()
    async with served(answers) as (reader, writer):
        writer.write(GET % b"large" + GET % b"stream")
        async with asyncio.timeout(30):
            assert [await answers.ended.get() for _ in range(2)] == ["/large", "/stream"]
            assert await is_cut_off(reader)


@pytest.mark.parametrize("path", [b"stream", b"large"])
async def test_an_answer_that_is_not_read_ends_its_connection_even_if_its_last_part_is_sent(path: bytes) -> None:
    answers = Answers()
    async with served(answers) as (reader, writer):
        writer.write(GET % path)
        async with asyncio.timeout(30):
            await answers.ended.get()
            await asyncio.sleep(1.0)
            assert await is_cut_off(reader)


async def test_whoever_reads_slowly_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SEND_TIMEOUT_S", 1.0)
    async with served(Answers()) as (reader, writer):
        writer.write(GET % b"large")
        await reader.readuntil(b"\r\n\r\n")
        num_bytes = 0
        async with asyncio.timeout(60):
            # Systems report room for more in lumps of a megabyte or so.
            for _ in range(15):
                num_bytes += len(await reader.readexactly(1 << 20))
                await asyncio.sleep(0.1)
            assert len(await reader.readexactly(LARGE - num_bytes)) == LARGE - num_bytes
