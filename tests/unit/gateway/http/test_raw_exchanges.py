"""What HTTP connections make of raw bytes, by RFC 9110 and 9112: each exchange in one piece, and byte by byte."""

from __future__ import annotations

import asyncio
import json
from http.client import HTTPResponse
from io import BytesIO
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from paceline.gateway.http.connection import BoundedConnection
from paceline.service.fair_shares import EvictingLimit

CLOSE = b"connection: close\r\n"
POST = b"POST /echo HTTP/1.1\r\nhost: x\r\n"
HELLO = b"content-length: 5\r\n\r\nhello"
CHUNKS = b"transfer-encoding: chunked\r\n\r\n2;note=1\r\nhe\r\n3\r\nllo\r\n0\r\nx-trailer: a\r\n\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
LAST = b"GET /last HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n"
ECHOED, EMPTY = (200, "POST /echo hello"), (200, "GET /last ")
REFUSED = (400, "")

EXCHANGES: dict[str, tuple[bytes, list[tuple[int, str]]]] = {
    # RFC 9110, 7.8: a server may ignore Upgrade; it then serves the request, body and all.
    "h2c, as Java's client offers it": (POST + H2C + HELLO + LAST, [ECHOED, EMPTY]),
    "h2c, and a body in chunks": (POST + H2C + CHUNKS + LAST, [ECHOED, EMPTY]),
    "TLS": (POST + b"connection: upgrade\r\nupgrade: TLS/1.2\r\n" + HELLO + LAST, [ECHOED, EMPTY]),
    "a web socket": (POST + b"connection: upgrade\r\nupgrade: websocket\r\n" + HELLO + LAST, [ECHOED, EMPTY]),
    "h2c without a body": (b"GET /a HTTP/1.1\r\nhost: x\r\n" + H2C + b"\r\n" + LAST, [(200, "GET /a "), EMPTY]),
    "h2c with the last request": (POST + H2C.replace(b"Upgrade,", b"close, Upgrade,") + HELLO, [ECHOED]),
    "h2c twice": ((POST + H2C + HELLO) * 2 + LAST, [ECHOED, ECHOED, EMPTY]),
    "h2c with HTTP/1.0": (POST.replace(b"1.1", b"1.0") + H2C + HELLO, [ECHOED]),
    "h2c and two lengths": (POST + H2C + b"content-length: 4\r\n" + HELLO, [REFUSED]),
    # RFC 9112, 6.1: no chunks to HTTP/1.0; 9.3: such a connection ends with its answer.
    "a stream to HTTP/1.0": (b"GET /stream HTTP/1.0\r\n\r\n", [(200, "abc")]),
    "a stream to HTTP/1.1": (b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n" + LAST, [(200, "abc"), EMPTY]),
    "the head of a stream to HTTP/1.0": (b"HEAD /stream HTTP/1.0\r\n\r\n", [(200, "")]),
    "a body of HTTP/1.0": (b"POST /echo HTTP/1.0\r\nhost: x\r\n" + HELLO, [ECHOED]),
    "HTTP/1.0 that wants to stay": (b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", [(200, "GET /a ")]),
    # RFC 9112, 3.2: one Host; 2.2: empty lines before a request; 3.2.2 and 3.2.4: other forms of a target.
    "no host": (b"GET /a HTTP/1.1\r\n\r\n", [REFUSED]),
    "two hosts": (b"GET /a HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", [REFUSED]),
    "empty lines before a request": (b"\r\n\r\n" + POST + HELLO + LAST, [ECHOED, EMPTY]),
    "a whole address": (b"GET http://x/last HTTP/1.1\r\nhost: x\r\n" + CLOSE + b"\r\n", [EMPTY]),
    "CONNECT": (b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n", [REFUSED]),
    # RFC 9112, 5 and 6.3: what may hide a second request.
    "a space before a colon": (b"GET /a HTTP/1.1\r\nhost : x\r\n\r\n", [REFUSED]),
    "a folded header": (b"GET /a HTTP/1.1\r\nhost: x\r\nx-a: b\r\n c\r\n\r\n", [REFUSED]),
    "two lengths": (POST + b"content-length: 4\r\n" + HELLO, [REFUSED]),
    "a length and chunks": (POST + b"content-length: 5\r\n" + CHUNKS, [REFUSED]),
    "a length that is none": (POST + b"content-length: -5\r\n\r\n", [REFUSED]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [REFUSED]),
    # RFC 9112, 7.1: extensions and trailers of chunks are ignored; 9.3.2: answers come in order.
    "chunks": (POST + CHUNKS + LAST, [ECHOED, EMPTY]),
    "a request behind an answer under way": ((POST + HELLO) * 3 + LAST, [ECHOED] * 3 + [EMPTY]),
    "a request behind the last one": (LAST + POST + HELLO, [EMPTY]),
    # RFC 9110, 10.1.1: who waits for 100 is told to go on, unless that is HTTP/1.0.
    "Expect with HTTP/1.0": (b"POST /echo HTTP/1.0\r\nexpect: 100-continue\r\n" + HELLO, [ECHOED]),
}


class Client(asyncio.Transport):
    """The other end of a connection, which notes what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.got = BytesIO()
        self.closed = False

    def write(self, data: Any) -> None:
        self.got.write(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        """Everything comes all the same."""

    def resume_reading(self) -> None:
        """It never stopped."""

    def answers(self) -> list[tuple[int, str]]:
        """The answers, statuses and bodies."""
        kept = BytesIO(self.got.getvalue())
        kept.makefile = lambda *_: kept  # type: ignore[attr-defined]
        kept.close = lambda: None  # type: ignore[method-assign]
        told = []
        while kept.tell() < len(kept.getvalue()):
            answer = HTTPResponse(kept, method="HEAD" if b"\r\nx-is-head" in self.got.getvalue() else "GET")  # type: ignore[arg-type]
            answer.begin()
            told.append((answer.status, "" if answer.status >= 400 else answer.read().decode()))
            if answer.status >= 400:
                break
        return told


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with what was asked; or with a stream."""
    method, path = scope["method"], scope["path"]
    headers = [(b"x-is-head", b"1")] if method == "HEAD" else []
    if path == "/stream":
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in (b"a", b"bc", b""):
            await send({"type": "http.response.body", "body": part, "more_body": bool(part)})
        return
    body = f"{method} {path} ".encode() + await Request(scope, receive).body()
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def exchanged(sent: bytes, piece: int) -> Client:
    """What a client gets that sends in pieces."""
    config = uvicorn.Config(echo, log_config=None, access_log=False, lifespan="off", ws="none")
    config.load()
    state, client = ServerState(), Client()
    connection = BoundedConnection(config, state, {}, connections=EvictingLimit(8, BoundedConnection.end))
    connection.connection_made(client)
    for at in range(0, len(sent), piece):
        if not client.closed:
            connection.data_received(sent[at : at + piece])
    async with asyncio.timeout(30):
        while state.tasks:
            await asyncio.gather(*state.tasks)
    connection.connection_lost(None)
    return client


@pytest.mark.parametrize("piece", [1, 1_000_000])
@pytest.mark.parametrize("name", EXCHANGES)
async def test_an_exchange_is_what_the_standard_says(name: str, piece: int) -> None:
    """Java's client lost its first body to `Upgrade: h2c`; clients of HTTP/1.0 read the sizes of chunks as text."""
    sent, wanted = EXCHANGES[name]
    client = await exchanged(sent, piece)
    assert client.answers() == wanted
    assert client.closed
    assert b"HTTP/1.0" not in sent or b"chunked" not in client.got.getvalue()


async def test_who_waits_to_be_told_to_go_on_is_told_so() -> None:
    head, _, body = HELLO.partition(b"\r\n\r\n")
    client = await exchanged(POST + b"expect: 100-continue\r\n" + head + b"\r\n\r\n" + body + LAST, 1)
    assert client.got.getvalue().startswith((b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 "))


async def test_a_refusal_is_an_error_object_and_says_why() -> None:
    told = json.loads((await exchanged(b"GET /a HTTP/1.1\r\n\r\n", 100)).got.getvalue().partition(b"\r\n\r\n")[2])
    assert told["error"]["param"] == "headers"
    assert "a request needs one Host" in told["error"]["message"]
