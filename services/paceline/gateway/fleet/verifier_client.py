"""Calls verifiers: one channel per address, every await bounded, cancellation passed on at once.

It knows the wire, and neither text nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection
from dataclasses import dataclass

import grpc

from paceline.core.errors import PacelineError, PeerLostError, RemoteProtocolError, UnavailableError
from paceline.core.messages import VERIFIER, CommittedTokens, GenerateRequest
from paceline.obs.tracing import TRACEPARENT
from paceline.rpc.v1 import verifier_pb2, verifier_pb2_grpc
from paceline.service.credentials import FleetTls, channel
from paceline.service.process import CHANNEL_OPTIONS, KEEPALIVE_OPTIONS, TAKEN
from paceline.service.status import error_from_rpc
from paceline.wire import check_asked, committed_from_pb, generate_request_to_pb

STATUS_TIMEOUT_S = 1.0
_CHANNEL_OPTIONS = (
    *CHANNEL_OPTIONS,
    *KEEPALIVE_OPTIONS,
    # One that restarts is found again within a second or two.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_Call = grpc.aio.UnaryStreamCall[verifier_pb2.VerifierGenerateRequest, verifier_pb2.VerifierGenerateResponse]


@dataclass(slots=True, kw_only=True)
class RunningCall:
    """One session on a verifier.

    Attributes:
        request: The session.
        address: The verifier's.
        vocab_size: Tokens of its model.
        heard_s: When it was called or last sent a message, monotonic seconds.
        ran: Whether an engine has computed a part of it.
        unheard: Whether the verifier was lost after it had accepted the session, and before its first message.
        num_heard: Messages received.
        num_generated: Generated tokens of the session so far, including those that it began with.
        num_judged: Tokens of the prompt whose log probabilities have come.
        ended_by: Why the gateway itself ended it; None while it runs.
    """

    request: GenerateRequest
    address: str
    vocab_size: int
    heard_s: float
    ran: bool = False
    unheard: bool = False
    num_heard: int = 0
    num_generated: int = 0
    num_judged: int = 0
    ended_by: PacelineError | None = None

    def check(self) -> None:
        """Raises the error that the gateway ended the call with, if it did."""
        if self.ended_by is not None:
            raise self.ended_by

    def lost(self, error: grpc.aio.AioRpcError) -> None:
        """The call has failed; raises the error that the gateway ended it with, if it did."""
        self.check()
        self.unheard = not self.num_heard and TAKEN in dict(error.initial_metadata())

    def decoded(self, message: verifier_pb2.VerifierGenerateResponse) -> CommittedTokens:
        """Decodes a message of the verifier.

        Raises:
            RemoteProtocolError: It is malformed, or tells of something that the verifier was not asked for.
        """
        check_asked(
            message,
            self.request,
            num_generated=self.num_generated,
            num_judged=self.num_judged,
            vocab_size=self.vocab_size,
        )
        return committed_from_pb(message)

    def take(self, committed: CommittedTokens, now_s: float) -> None:
        """Takes in a message of the verifier.

        Raises:
            RemoteProtocolError: Tokens are missing before these, or these were sent before.
        """
        self.heard_s = now_s
        self.num_heard += 1
        self._take_judged(committed)
        if committed.token_ids and committed.offset != self.num_generated:
            raise RemoteProtocolError(
                f"VerifierGenerateResponse.offset: must be {self.num_generated}, the number of tokens received, got "
                f"{committed.offset}"
            )
        self.ran |= committed.running or bool(committed.token_ids)
        self.num_generated += len(committed.token_ids)

    def _take_judged(self, committed: CommittedTokens) -> None:
        if committed.prompt_logprobs and committed.prompt_offset != self.num_judged + 1:
            raise RemoteProtocolError(
                f"VerifierGenerateResponse.prompt_offset: must be {self.num_judged + 1}, got {committed.prompt_offset}"
            )
        self.num_judged += len(committed.prompt_logprobs)
        due = self.request.num_to_judge
        if committed.token_ids and self.num_judged < due:
            raise RemoteProtocolError(
                f"VerifierGenerateResponse.prompt_logprobs: {self.num_judged} came of {due} tokens"
            )


class VerifierClient:
    """Runs sessions on verifiers.

    Args:
        silence_s: Longest wait for a verifier's next message, in seconds.
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
        self._calls: dict[_Call, RunningCall] = {}
        self._abort_reason = ""

    @property
    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return bool(self._abort_reason)

    def running(self, address: str, request: GenerateRequest, vocab_size: int) -> RunningCall:
        """Returns the state of a call that is about to begin."""
        return RunningCall(
            request=request,
            address=address,
            vocab_size=vocab_size,
            heard_s=self._clock(),
            num_generated=len(request.committed_token_ids),
        )

    async def generate(self, running: RunningCall) -> AsyncGenerator[CommittedTokens, None]:
        """Yields what the verifier commits, with a result in the last message; closing the generator cancels the call.

        Args:
            running: The call; kept up to date while it runs.

        Raises:
            PacelineError: The verifier raised it, or the gateway ended the call with it.
            UnavailableError: The verifier cannot be reached, is silent too long, or the gateway shuts down.
            RemoteProtocolError: The verifier broke the protocol.
        """
        if self.aborted:
            raise UnavailableError(self._abort_reason)
        request = running.request
        metadata = ((TRACEPARENT, request.traceparent),) if request.traceparent else None
        call: _Call = self._stub(running.address).Generate(generate_request_to_pb(request), metadata=metadata)
        self._calls[call] = running
        try:
            while True:
                committed = await self._read(call, running)
                running.take(committed, self._clock())
                if committed.token_ids or committed.prompt_logprobs or committed.result is not None:
                    yield committed
                if committed.result is not None:
                    await self._await_status(call)
                    return
        finally:
            del self._calls[call]
            call.cancel()

    def end(self, chosen: Callable[[RunningCall], bool], error: PacelineError) -> None:
        """Ends the chosen calls: their readers get the error, at once or with their next read."""
        for call, running in list(self._calls.items()):
            if not running.ended_by and chosen(running):
                running.ended_by = error
                call.cancel()

    def abort(self, reason: str) -> None:
        """Ends all calls, and refuses later ones, with `UnavailableError(reason)`."""
        self._abort_reason = reason
        self.end(lambda _: True, UnavailableError(reason))

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Closes channels to verifiers that are gone and have no running call."""
        used = {running.address for running in self._calls.values()}
        for address in self._channels.keys() - set(addresses) - used:
            await self._channels.pop(address).close(None)

    async def close(self) -> None:
        """Closes all channels; running calls end."""
        channels, self._channels = self._channels, {}
        for opened in channels.values():
            await opened.close(None)

    def _stub(self, address: str) -> verifier_pb2_grpc.VerifierAsyncStub:
        opened = self._channels.get(address)
        if opened is None:
            opened = channel(address, tls=self._tls, role=VERIFIER, options=_CHANNEL_OPTIONS)
            self._channels[address] = opened
        return verifier_pb2_grpc.VerifierStub(opened)

    async def _await_status(self, call: _Call) -> None:
        """Lets the verifier end the call itself, so that it does not take a finished session for a cancelled one."""
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                await call.code()
        except TimeoutError:
            return

    async def _read(self, call: _Call, running: RunningCall) -> CommittedTokens:
        running.check()
        try:
            async with asyncio.timeout(self._silence_s):
                message = await call.read()
        except TimeoutError:
            raise PeerLostError(f"the verifier at {running.address} was silent for {self._silence_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            running.lost(error)
            raise error_from_rpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and not task.cancelling():
                running.check()
            raise
        if not isinstance(message, verifier_pb2.VerifierGenerateResponse):
            raise RemoteProtocolError(f"the verifier at {running.address} ended the stream without a result")
        return running.decoded(message)
