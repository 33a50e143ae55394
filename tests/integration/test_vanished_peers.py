"""A peer that is gone without a FIN, as when its host is lost: the services notice by pings, and end its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest

from paceline.core.messages import DRAFTER, GATEWAY, VERIFIER
from paceline.gateway.fleet.verifier_client import _CHANNEL_OPTIONS as TO_VERIFIERS
from paceline.service.credentials import channel
from paceline.service.process import _SERVER_OPTIONS, KEEPALIVE_OPTIONS, start_grpc_server
from paceline.tier.links import _OPTIONS as TO_DRAFTERS

SOON = (
    ("grpc.keepalive_time_ms", 200),
    ("grpc.keepalive_timeout_ms", 200),
    ("grpc.http2.ping_timeout_ms", 200),
)


class Proxy:
    """Passes on all bytes, until it swallows them; the connections through it stay open."""

    def __init__(self, port: int) -> None:
        self.swallows = False
        self._port = port
        self._writers: list[asyncio.StreamWriter] = []

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, inner_writer]
        await asyncio.gather(self._pass(reader, inner_writer), self._pass(inner_reader, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                if not self.swallows:
                    writer.write(data)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class Endless(grpc.GenericRpcHandler):
    """A call of any method says that it has begun, and never ends by itself."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails):
        return grpc.unary_stream_rpc_method_handler(self._run, request_deserializer=bytes)

    async def _run(self, request: bytes, context) -> AsyncIterator[bytes]:
        try:
            yield b"begun"
            await asyncio.Event().wait()
        finally:
            self.ended.set()


@asynccontextmanager
async def behind_a_proxy(options) -> AsyncIterator[tuple[Endless, Proxy, str]]:
    endless = Endless()
    server = await start_grpc_server(
        host="127.0.0.1",
        port=0,
        add_servicers=lambda server: server.add_generic_rpc_handlers((endless,)),
        service_names=[],
        options=options,
    )
    proxy = Proxy(server.port)
    front = await asyncio.start_server(proxy.accept, "127.0.0.1", 0)
    async with server:
        try:
            yield endless, proxy, f"127.0.0.1:{front.sockets[0].getsockname()[1]}"
        finally:
            proxy.close()
            front.close()


async def test_a_service_ends_the_calls_of_a_peer_that_vanished() -> None:
    """Audit 3, a14: a verifier computed the sessions of a lost gateway to their ends, and `drain` waited for them."""
    async with behind_a_proxy(SOON) as (endless, proxy, address), grpc.aio.insecure_channel(address) as opened:
        call = opened.unary_stream("/any/Method")(b"")
        assert await call.read() == b"begun"
        proxy.swallows = True
        await asyncio.wait_for(endless.ended.wait(), 30)


@pytest.mark.parametrize(("options", "role"), [(TO_VERIFIERS, VERIFIER), (TO_DRAFTERS, DRAFTER)])
async def test_a_caller_notices_that_a_service_vanished(options, role: str) -> None:
    soon = tuple({**dict(options), **dict(SOON)}.items())
    async with (
        behind_a_proxy(()) as (_, proxy, address),
        channel(address, tls=None, role=role, options=soon) as opened,
    ):
        call = opened.unary_stream("/any/Method")(b"")
        assert await call.read() == b"begun"
        proxy.swallows = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(call.read(), 30)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("options", [_SERVER_OPTIONS, TO_VERIFIERS, TO_DRAFTERS], ids=["servers", GATEWAY, VERIFIER])
def test_all_look_after_their_peers_within_tens_of_seconds(options) -> None:
    assert set(KEEPALIVE_OPTIONS) <= set(options)
    named = dict(options)
    assert named["grpc.keepalive_time_ms"] + named["grpc.http2.ping_timeout_ms"] <= 30_000
