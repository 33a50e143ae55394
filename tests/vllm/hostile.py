"""A drafter that greets as it should and then says what no drafter may; in a thread of its own, at any port."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc

from paceline.core.messages import Commits, ModelIdentity, OpenSession
from paceline.rpc.v1 import drafter_pb2
from paceline.wire import draft_request_from_pb, draft_response_to_pb
from tests.support.guesses import NodeGuess, SessionDrafts, to_drafts

FLOOD_NODES, FLOOD_MESSAGES = 1000, 100
NO_TOKEN = 2**31 - 1

# A number that no session has.
NOBODY = 10**9
# What it says of a session of which it has heard: its number, and how long it is.
Script = Callable[[int, int], Iterator[bytes]]
_ids = itertools.count(1)


def flood(number: int, length: int) -> Iterator[bytes]:
    """Far more guesses than anybody asked for, all of them the next token."""
    for _ in range(FLOOD_MESSAGES):
        yield _nodes(number, length, list(range(FLOOD_NODES)))


def no_tokens(number: int, length: int) -> Iterator[bytes]:
    """Guesses that are no tokens."""
    yield _nodes(number, length, [NO_TOKEN] * 4)
    yield _nodes(number, length, [NO_TOKEN])


def wrong_guesses(number: int, length: int) -> Iterator[bytes]:
    """Tokens that are hardly ever right, with full confidence, also of sessions and places that are not there."""
    yield _nodes(number, length, [1, 2, 3])
    yield _nodes(number, length + 500, [4])
    yield _nodes(NOBODY, length, [5])


def garbage(number: int, length: int) -> Iterator[bytes]:
    """Bytes that are no message."""
    del number, length
    yield b"\xff" * 64


SCRIPTS: dict[str, Script] = {
    "flood": flood,
    "no tokens": no_tokens,
    "wrong guesses": wrong_guesses,
    "garbage": garbage,
}


class HostileDrafter(grpc.GenericRpcHandler):
    """Counts what it has said.

    Args:
        identity: What it says of its model.
        script: What it answers to each session that it hears of.
    """

    def __init__(self, identity: ModelIdentity, script: Script) -> None:
        self.num_said = 0
        self.num_met = 0
        self._script = script
        self._hello = draft_response_to_pb((), draft=identity).SerializeToString()

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        del details
        return grpc.stream_stream_rpc_method_handler(
            self._draft, request_deserializer=drafter_pb2.DraftRequest.FromString
        )

    async def _draft(self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Any) -> AsyncIterator[bytes]:
        del context
        async for request in requests:
            if request.HasField("target"):
                self.num_met += 1
                yield self._hello
            for number, known in _heard(request):
                for line in self._script(number, known):
                    self.num_said += 1
                    yield line


def _heard(request: drafter_pb2.DraftRequest) -> Iterator[tuple[int, int]]:
    """Sessions that a verifier tells of, and how long they are."""
    for message in draft_request_from_pb(request)[1]:
        match message:
            case OpenSession():
                yield message.number, len(message.token_ids)
            case Commits():
                yield from ((commit.number, commit.base_len + len(commit.token_ids)) for commit in message)


@contextmanager
def hostile_drafter(port: int, identity: ModelIdentity, script: Script) -> Iterator[HostileDrafter]:
    """Serves it at a port of this host."""
    drafter = HostileDrafter(identity, script)
    loop, ready = asyncio.new_event_loop(), threading.Event()
    thread = threading.Thread(target=_serve, args=(loop, ready, port, drafter), name="hostile", daemon=True)
    thread.start()
    ready.wait(10)
    try:
        yield drafter
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def other_vocabulary(identity: ModelIdentity) -> ModelIdentity:
    """The same model, if its tokens were others."""
    return replace(identity, vocab_hash="0" * len(identity.vocab_hash))


def _serve(loop: asyncio.AbstractEventLoop, ready: threading.Event, port: int, drafter: HostileDrafter) -> None:
    asyncio.set_event_loop(loop)

    async def start() -> grpc.aio.Server:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((drafter,))
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server

    server = loop.run_until_complete(start())
    ready.set()
    loop.run_forever()
    loop.run_until_complete(server.stop(0))
    loop.close()


def _nodes(number: int, base_len: int, token_ids: list[int]) -> bytes:
    """Children of the last committed token."""
    nodes = [NodeGuess(node_id, 0, token_id, 1.0) for token_id, node_id in zip(token_ids, _ids, strict=False)]
    return draft_response_to_pb([to_drafts(SessionDrafts(number, base_len, nodes))]).SerializeToString()
