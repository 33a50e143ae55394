"""Calls verifiers: one stream per address for all sessions there, every await bounded, cancellation passed on at once.

It knows the wire, and neither text nor HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from paceline.core.errors import (
    InvalidRequestError,
    PacelineError,
    PeerLostError,
    PeerSilentError,
    RemoteProtocolError,
    UnavailableError,
)
from paceline.core.messages import NS_PER_S, VERIFIER, GenerateRequest, SessionEvent
from paceline.rpc.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.service.credentials import FleetTls, channel
from paceline.service.outbox import Outbox, sending
from paceline.service.process import CHANNEL_OPTIONS, KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES
from paceline.service.status import error_from_rpc
from paceline.wire import AskedSession, log_from_pb, start_session_to_pb
from paceline.wire.columns import MAX_NUMBER
from paceline.wire.common import PROTOCOL, check_protocol

# A verifier sends the speculation record of a left session at once.
RECORD_TIMEOUT_S = 1.0
# An engine that computes a session says so within this time; while others run, its sign of life comes about as often.
LIFE_AFTER_S = 1.0
# Bytes queued per verifier.
VERIFIER_BYTES = 64 * 1024 * 1024
# Sessions of other verifiers, and other waiters, get the event loop after so long amid a message.
SLICE_S = 0.005
# Overhead of a one-session message.
MESSAGE_BYTES = 64
_CHANNEL_OPTIONS = (
    *CHANNEL_OPTIONS,
    *KEEPALIVE_OPTIONS,
    # A restarted verifier is found again within a second or two.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_Call = grpc.aio.StreamStreamCall[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse]
logger = logging.getLogger(__name__)


# Takes a session's tokens from a verifier, their origins (none: unknown) and the event beside them; returns whether its
# client has all that it wants.
OnCommit = Callable[[tuple[int, ...], bytes, SessionEvent], bool]


@dataclass(slots=True, eq=False, kw_only=True)
class RunningCall(AskedSession):
    """A session on a verifier.

    A plain function receives the verifier's messages, in the turn of the event loop in which they come and in the
    context of the session's runner, which is woken at its end.

    Attributes:
        address: The verifier's.
        take: Takes its messages. An error that this raises ends the session, and no other.
        ran: Whether an engine has computed a part of it.
        taken_s: When the verifier accepted it, monotonic seconds; None: it has not yet.
        unheard: Whether the verifier was lost soon after it had accepted the session, and before it sent anything of
            it. A verifier that was alive for longer lets the session wait, for a place or its grammar.
        ended_by: Why the gateway itself ended it; None while it runs.
        is_left: The client has all that it wants; what is yet to come is the record.
    """

    address: str
    take: OnCommit
    ran: bool = False
    taken_s: float | None = None
    unheard: bool = False
    ended_by: Exception | None = None
    is_left: bool = False
    _stream: _VerifierStream | None = None
    _num_heard: int = 0
    _error: Exception | None = None
    _context: Context = field(default_factory=copy_context)
    _over: asyncio.Event = field(default_factory=asyncio.Event)
    _recorded: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def heard_s(self) -> float:
        """When the verifier last showed life, or was given its first session, monotonic seconds."""
        assert self._stream is not None, "it has begun"
        return self._stream.heard_s

    def begun(self, stream: _VerifierStream) -> None:
        self._stream = stream

    def put(self, token_ids: tuple[int, ...], origins: bytes, event: SessionEvent) -> None:
        """Tokens or an event have come from the verifier."""
        self._num_heard += 1
        self.ran |= event.running or bool(token_ids)
        if self.is_left:
            if event.result is not None or not (token_ids or event.prompt_logprobs or event.running):
                self._taken((), b"", SessionEvent(speculation=event.speculation))
                self._recorded.set()
        elif not self._over.is_set() and (token_ids or event.prompt_logprobs or event.result or event.speculation):
            has_all = self._taken(token_ids, origins, event)
            self.is_left = has_all and event.result is None
            if has_all or event.result is not None:
                self._over.set()

    def lose(self, error: PacelineError) -> None:
        """The verifier has ended it, or is lost."""
        self.unheard = self.taken_s is not None and not self._num_heard and self.heard_s - self.taken_s < LIFE_AFTER_S
        self._fail(error)

    def _taken(self, token_ids: tuple[int, ...], origins: bytes, event: SessionEvent) -> bool:
        """Returns whether the client has all; an error ends this session, and no other of the stream."""
        try:
            return self._context.run(self.take, token_ids, origins, event)
        except Exception as error:  # noqa: BLE001 - raised again by `run`
            self._error = error
            self.end(error)
            return False

    def end(self, error: Exception) -> None:
        """The gateway ends it: its runner gets the error."""
        self.ended_by = error
        self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._recorded.set()
        if not self._over.is_set():
            self._error = error
            self._over.set()

    async def run(self) -> None:
        """Returns when the session has ended, and of one that is left when its record is there, or does not come.

        Raises:
            PacelineError: The session has ended early.
        """
        await self._over.wait()
        if self.is_left:
            with suppress(TimeoutError):
                async with asyncio.timeout(RECORD_TIMEOUT_S):
                    await self._recorded.wait()
        if self._error is not None:
            raise self._error


class _VerifierStream:
    """All sessions of this gateway on one verifier; dialled with the first of them.

    Attributes:
        over: It has ended, with all its sessions.
        heard_s: When the verifier last showed life, or was given its first session.
        step_s: For how long its step had lasted then.
    """

    def __init__(
        self, address: str, stub: verifier_pb2_grpc.VerifierAsyncStub, silence_s: float, clock: Callable[[], float]
    ) -> None:
        self.address = address
        self.over = False
        self._silence_s = silence_s
        self._clock = clock
        self.heard_s = clock()
        self.step_s = 0.0
        self._calls: dict[int, RunningCall] = {}
        self._last_number = 0
        self._requests: Outbox[verifier_pb2.VerifyRequest] = Outbox(VERIFIER_BYTES)
        # Runs while the verifier has sessions.
        self._watch: asyncio.TimerHandle | None = None
        # Makes the error of each session when the stream ends.
        self._why: Callable[[], PacelineError] = partial(UnavailableError, f"the stream to {address} was closed")
        # An empty context: it outlives the request it was dialled for, and must not log under its trace.
        self._task = asyncio.create_task(self._run(stub), name=f"sessions at {address}", context=Context())
        self._task.add_done_callback(self._ended)

    @property
    def calls(self) -> Collection[RunningCall]:
        return self._calls.values()

    def start(self, call: RunningCall) -> int:
        """Starts a session; returns its number.

        Raises:
            InvalidRequestError: It is too large for a message, or a number of it for its field.
            UnavailableError: The stream has no number left; it ends, and the next session dials anew.
        """
        number = self._last_number + 1
        if number > MAX_NUMBER:
            self._end(partial(UnavailableError, f"the stream to {self.address} has no number left for a session"))
            raise self._why()
        message = verifier_pb2.VerifyRequest(starts=[start_session_to_pb(number, call.request)])
        num_bytes = message.ByteSize()
        if num_bytes > MAX_MESSAGE_BYTES:
            raise InvalidRequestError("request", f"has {num_bytes} bytes, at most {MAX_MESSAGE_BYTES} are allowed")
        if not self._calls:
            self.heard_s = self._clock()
        self._last_number = number
        self._calls[number] = call
        call.begun(self)
        if self._watch is None:
            self._look()
        self._say(message, num_bytes)
        return number

    def leave(self, number: int) -> None:
        """Frees a session, if it still runs; later messages about it are passed over."""
        call = self._calls.pop(number, None)
        if call is not None and not call.is_left:
            self._say_left(number)

    def close(self) -> None:
        """Ends the stream with its sessions."""
        self._task.cancel()

    def _say_left(self, number: int) -> None:
        self._say(verifier_pb2.VerifyRequest(leaves=[number]), MESSAGE_BYTES)

    def _say(self, message: verifier_pb2.VerifyRequest, num_bytes: int) -> None:
        try:
            self._requests.put([(message, num_bytes)])
        except asyncio.QueueFull:
            self._end(partial(PeerLostError, f"the verifier at {self.address} does not read"))

    def _look(self) -> None:
        """Ends the stream if the verifier has been silent for too long, and looks again when it may have been."""
        self._watch = None
        left_s = self.heard_s + self._silence_s - self._clock()
        if self._calls and left_s <= 0.0:
            inside = f", {self.step_s:.1f} s into a step" if self.step_s else ""
            problem = f"the verifier at {self.address} was silent for {self._silence_s:g} s{inside}"
            self._end(partial(PeerSilentError, problem))
        elif self._calls:
            self._watch = asyncio.get_running_loop().call_later(left_s, self._look)

    def _end(self, why: Callable[[], PacelineError]) -> None:
        self._why = why
        self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.over = True
        if self._watch is not None:
            self._watch.cancel()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            self._why = partial(self._error_of, error)
        elif isinstance(error, RemoteProtocolError | UnavailableError):
            self._why = partial(type(error), str(error))
        elif error is not None:
            logger.error("reading a verifier's stream failed", exc_info=error, extra={"verifier": self.address})
            self._why = partial(UnavailableError, f"the stream of {self.address} cannot be read")
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.lose(self._why())

    def _error_of(self, error: grpc.aio.AioRpcError) -> PacelineError:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return RemoteProtocolError(
                f"protocol: the verifier at {self.address} speaks a version before {PROTOCOL}, which we speak: run the"
                " same release everywhere"
            )
        return error_from_rpc(error)

    async def _run(self, stub: verifier_pb2_grpc.VerifierAsyncStub) -> None:
        call = stub.Verify()  # type: ignore[call-arg]  # they are written below
        async with sending(call, self._said()):
            greeting = await self._read(call)
            check_protocol(f"the verifier at {self.address}", greeting.protocol)
            while True:
                await self._take(await self._read(call))

    async def _said(self) -> AsyncIterator[verifier_pb2.VerifyRequest]:
        yield verifier_pb2.VerifyRequest(protocol=PROTOCOL)
        while True:
            yield await self._requests.get()

    async def _read(self, call: _Call) -> verifier_pb2.VerifyResponse:
        message: Any = await call.read()
        if message is None:  # gRPC's result for bytes that are not a message
            raise RemoteProtocolError(f"the verifier at {self.address} sent bytes that are no message")
        if not isinstance(message, verifier_pb2.VerifyResponse):
            raise UnavailableError(f"the verifier at {self.address} ended the stream")
        return message

    async def _take(self, message: verifier_pb2.VerifyResponse) -> None:
        outcomes = log_from_pb(message, self._calls, self._last_number)
        now_s = self._clock()
        if message.alive:
            self.heard_s, self.step_s = now_s, message.step_ns / NS_PER_S
        for number in message.taken:
            if number in self._calls:
                self._calls[number].taken_s = now_s
        for number, token_ids, origins, outcome in outcomes:
            call = self._calls.get(number)
            if call is None:
                continue
            if isinstance(outcome, PacelineError):
                self._lose(number, call, outcome)
            else:
                self._hand_on(number, call, token_ids, origins, outcome)
            if self._clock() - now_s > SLICE_S:
                await asyncio.sleep(0)
                now_s = self._clock()

    def _hand_on(
        self, number: int, call: RunningCall, token_ids: tuple[int, ...], origins: bytes, event: SessionEvent
    ) -> None:
        was_left = call.is_left
        if event.result is not None:
            del self._calls[number]
        call.put(token_ids, origins, event)
        if call.ended_by is not None:
            self.leave(number)
        elif call.is_left and not was_left:
            self._say_left(number)

    def _lose(self, number: int, call: RunningCall, error: PacelineError) -> None:
        if isinstance(error, RemoteProtocolError):
            # The verifier does not know what is wrong with its message.
            self.leave(number)
        self._calls.pop(number, None)
        call.lose(error)


class VerifierClient:
    """Runs sessions on verifiers.

    Args:
        silence_s: Longest time without a sign of life from a verifier that has sessions, in seconds.
        tls: Certificate to show; None: plain text.
        clock: Monotonic seconds.
    """

    def __init__(
        self, silence_s: float, tls: FleetTls | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._silence_s = silence_s
        self._tls = tls
        self._clock = clock
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._streams: dict[str, _VerifierStream] = {}
        self._abort_reason = ""

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return bool(self._abort_reason)

    def running(self, address: str, request: GenerateRequest, vocab_size: int, take: OnCommit) -> RunningCall:
        """Returns the state of a session that is about to begin; see `RunningCall`."""
        return RunningCall(request=request, vocab_size=vocab_size, address=address, take=take)

    async def run(self, running: RunningCall) -> None:
        """Runs a session to its end; cancelling it frees the session.

        The last message has a result; of a session whose client has all that it wants, its record alone.

        Args:
            running: The session; kept up to date while it runs.

        Raises:
            PacelineError: The verifier ended it so, or the gateway did.
            UnavailableError: The verifier cannot be reached, is silent too long, or the gateway shuts down.
            RemoteProtocolError: The verifier broke the protocol.
        """
        if self.aborted:
            raise UnavailableError(self._abort_reason)
        stream = self._stream(running.address)
        number = stream.start(running)
        try:
            await running.run()
        finally:
            stream.leave(number)

    def end(self, chosen: Callable[[RunningCall], bool], error: PacelineError) -> None:
        """Ends the chosen sessions with an error."""
        for stream in self._streams.values():
            for running in stream.calls:
                if not running.ended_by and chosen(running):
                    running.end(error)

    def abort(self, reason: str) -> None:
        """Ends all sessions, and refuses later ones, with `UnavailableError(reason)`."""
        self._abort_reason = reason
        self.end(lambda _: True, UnavailableError(reason))

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Closes streams to verifiers that are gone and have no session."""
        used = {address for address, stream in self._streams.items() if stream.calls}
        for address in self._channels.keys() - set(addresses) - used:
            await self._close(address)

    async def close(self) -> None:
        """Closes all streams; sessions end."""
        for address in [*self._channels]:
            await self._close(address)

    async def _close(self, address: str) -> None:
        stream = self._streams.pop(address, None)
        if stream is not None:
            stream.close()
        await self._channels.pop(address).close(None)

    def _stream(self, address: str) -> _VerifierStream:
        opened = self._channels.get(address)
        if opened is None:
            opened = channel(address, tls=self._tls, role=VERIFIER, options=_CHANNEL_OPTIONS)
            self._channels[address] = opened
        stream = self._streams.get(address)
        if stream is None or stream.over:
            stub: verifier_pb2_grpc.VerifierAsyncStub = verifier_pb2_grpc.VerifierStub(opened)
            stream = self._streams[address] = _VerifierStream(address, stub, self._silence_s, self._clock)
        return stream
