"""Streams to drafters: one each, dialled when first needed, redialled when lost, never waited for.

Any error of a drafter ends its stream and nothing else. When a stream comes up again, all its sessions are opened
again: the drafter's state is soft.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.core.errors import RemoteProtocolError
from paceline.core.messages import DRAFTER, Commits, ModelIdentity, OpenSession, ToDrafter, ToVerifier
from paceline.rpc.v1 import drafter_pb2, drafter_pb2_grpc
from paceline.service.credentials import FleetTls, channel
from paceline.service.outbox import Outbox, sending
from paceline.service.process import CHANNEL_OPTIONS, KEEPALIVE_OPTIONS
from paceline.wire import draft_request_to_pb, draft_response_from_pb, in_parts, size_of
from paceline.wire.drafts import MAX_RESPONSE_BYTES

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
FIRST_BACKOFF_S = 0.1
# Short, since sessions may wait for this drafter after another died; a refused connection costs next to nothing.
LAST_BACKOFF_S = 0.5
# The round trip is the shortest of several pings, since event loops may be busy; repeated, since paths change.
PINGS, PING_TIMEOUT_S, PING_PERIOD_S = 5, 1.0, 60.0
# A drafter that leaves more unread counts as dead; it is dialled again, and its sessions are opened again. A drafter
# that said of its sessions in each step that it knew nothing, and did not read, was sent gigabytes.
OUTBOX_BYTES = 64 * 1024 * 1024
_OPTIONS = (
    *{**dict(CHANNEL_OPTIONS), "grpc.max_receive_message_length": MAX_RESPONSE_BYTES}.items(),
    *KEEPALIVE_OPTIONS,
    # Each try is a new channel, without the pause that gRPC keeps after an earlier failure.
    ("grpc.use_local_subchannel_pool", 1),
)


class DrafterLink:
    """A drafter's stream, kept up by a task.

    Args:
        address: Where the drafter listens, `host:port`.
        target: Our model; a drafter that cannot draft for it refuses.
        on_change: Called with the drafter's identity when the stream is up, with None when it is lost.
        on_messages: Awaited with the drafter's messages; the next ones are read when it is done.
        tls: Certificate to show; None: plain text.
        verifier: Our address, by which the drafter's metrics name us; empty: none.
    """

    def __init__(
        self,
        address: str,
        target: ModelIdentity,
        on_change: Callable[[str, ModelIdentity | None], None],
        on_messages: Callable[[str, Sequence[ToVerifier]], Awaitable[None]],
        tls: FleetTls | None = None,
        verifier: str = "",
    ) -> None:
        self.address = address
        self._verifier = verifier
        self._target = target
        self._on_change = on_change
        self._on_messages = on_messages
        self._tls = tls
        self._outbox: Outbox[Sequence[ToDrafter]] = Outbox(OUTBOX_BYTES)
        # The highest session number sent to it; numbers grow.
        self._last_number = 0
        self._stream: asyncio.Task[None] | None = None
        self._up = False
        # After a loss only the first failed try is logged.
        self._complained = False
        self._round_trip_s: float | None = None
        self._down_since_s = asyncio.get_running_loop().time()
        # An empty context: the link outlives the request it was dialled for, and must not log under its trace.
        self._keeper = asyncio.create_task(self._keep_up(), name=f"link to {address}", context=Context())

    @property
    def down_s(self) -> float:
        """Seconds since the stream was up; 0 while it is."""
        return 0.0 if self._up else asyncio.get_running_loop().time() - self._down_since_s

    @property
    def round_trip_s(self) -> float | None:
        """Seconds to the drafter and back, without its work; None before it was measured."""
        return self._round_trip_s

    def send(self, messages: Sequence[ToDrafter]) -> None:
        """Queues messages of one step; never blocks. Messages queued while the stream is down are dropped."""
        for message in messages:
            if isinstance(message, OpenSession):
                self._last_number = max(self._last_number, message.number)
            elif isinstance(message, Commits):
                self._last_number = max(self._last_number, int(message.numbers.max(initial=0)))
        try:
            self._outbox.put([(part, size_of(*part)) for part in in_parts(messages)])
        except asyncio.QueueFull:
            self.reset("the drafter does not read")

    def reset(self, reason: str) -> None:
        """Ends the stream; a new one is dialled."""
        logger.warning("resetting a drafter's stream", extra={"drafter": self.address, "reason": reason})
        if self._stream is not None:
            self._stream.cancel()

    async def close(self) -> None:
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep_up(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            self._stream = asyncio.create_task(self._run_stream())
            try:
                await asyncio.wait({self._stream})
            finally:
                self._stream.cancel()
            was_up = self._end_of_stream(self._stream)
            backoff_s = FIRST_BACKOFF_S if was_up else min(2 * backoff_s, LAST_BACKOFF_S)
            await asyncio.sleep(backoff_s)

    def _end_of_stream(self, stream: asyncio.Task[None]) -> bool:
        """Logs how a stream ended; returns whether it had been up."""
        error = None if stream.cancelled() else stream.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            reason = f"{error.code().name}: {error.details()}"
        else:
            reason = repr(error) if error else "ended"
        was_up, self._up = self._up, False
        if was_up or not self._complained:
            logger.warning("no stream to drafter", extra={"drafter": self.address, "reason": reason})
        self._complained = True
        if was_up:
            self._down_since_s = asyncio.get_running_loop().time()
            self._on_change(self.address, None)
        return was_up

    async def _run_stream(self) -> None:
        self._outbox = Outbox(OUTBOX_BYTES)
        async with channel(self.address, tls=self._tls, role=DRAFTER, options=_OPTIONS) as opened:
            stub: drafter_pb2_grpc.DrafterAsyncStub = drafter_pb2_grpc.DrafterStub(opened)
            call = stub.Draft()  # type: ignore[call-arg]  # they are written below
            responses = aiter(call)
            async with sending(call, self._requests(self._outbox)):
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    draft = await self._greet(responses)
                self._up, self._complained = True, False
                logger.info("stream to drafter is up", extra={"drafter": self.address})
                self._on_change(self.address, draft)
                async with self._pinged(opened):
                    await self._receive(responses)

    async def _receive(self, responses: AsyncIterator[drafter_pb2.DraftResponse]) -> None:
        async for response in responses:
            if response is None:  # gRPC's result for bytes that are not a message
                raise RemoteProtocolError(f"drafter {self.address} sent bytes that are no message")
            _, messages = draft_response_from_pb(response, self._last_number)
            await self._on_messages(self.address, messages)

    @asynccontextmanager
    async def _pinged(self, opened: grpc.aio.Channel) -> AsyncIterator[None]:
        """Measures the round trip now and then while a block runs."""
        pinging = asyncio.create_task(self._ping(opened), name=f"pings to {self.address}")
        try:
            yield
        finally:
            pinging.cancel()
            await asyncio.gather(pinging, return_exceptions=True)

    async def _ping(self, opened: grpc.aio.Channel) -> None:
        """Measures calls of the health service, which do not involve the drafter's engine; failures are ignored."""
        stub: health_pb2_grpc.HealthAsyncStub = health_pb2_grpc.HealthStub(opened)
        clock = asyncio.get_running_loop().time
        while True:
            with suppress(grpc.aio.AioRpcError):
                taken_s = []
                for _ in range(PINGS):
                    begun_s = clock()
                    await stub.Check(health_pb2.HealthCheckRequest(), timeout=PING_TIMEOUT_S)
                    taken_s.append(clock() - begun_s)
                self._round_trip_s = min(taken_s)
            await asyncio.sleep(PING_PERIOD_S)

    async def _greet(self, responses: AsyncIterator[drafter_pb2.DraftResponse]) -> ModelIdentity:
        draft, _ = draft_response_from_pb(await anext(responses))
        if draft is None or not draft.drafts_for(self._target):
            raise RemoteProtocolError(f"drafter {self.address} drafts for another vocabulary, or from other states")
        return draft

    async def _requests(self, outbox: Outbox[Sequence[ToDrafter]]) -> AsyncIterator[drafter_pb2.DraftRequest]:
        yield draft_request_to_pb((), target=self._target, verifier=self._verifier)
        while True:
            # Encoded one by one as they leave; all sessions at once could block the event loop.
            yield draft_request_to_pb(await outbox.get())
