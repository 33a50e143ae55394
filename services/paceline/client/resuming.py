"""Streams completions over gRPC from any of several gateways, and continues at another one when a stream breaks.

For programs that must not lose a token when a gateway dies: each token comes once, in order, as long as some gateway
can be reached again in time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from paceline.core.errors import (
    InvalidRequestError,
    OverloadedError,
    PacelineError,
    ResumeMismatchError,
    SessionNotFoundError,
    StaleEpochError,
    UnavailableError,
)
from paceline.core.messages import TokenDigest
from paceline.core.params import COUPLED
from paceline.rpc.v1 import gateway_pb2, gateway_pb2_grpc
from paceline.service.process import CHANNEL_OPTIONS
from paceline.service.status import error_from_rpc

FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
_OPTIONS = (
    *CHANNEL_OPTIONS,
    # Detects a vanished gateway within seconds.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)

_Call = grpc.aio.UnaryStreamCall[Any, gateway_pb2.GatewayGenerateResponse]


@dataclass(slots=True)
class Progress:
    """A client's part of a completion so far."""

    session_id: str = ""
    num_tokens: int = 0
    num_chars: int = 0
    digest: TokenDigest = field(default_factory=TokenDigest)
    # Tokens that a restarted stream will repeat, and the digest of the repeated ones so far.
    skip_tokens: int = 0
    skip_chars: int = 0
    skipped: TokenDigest = field(default_factory=TokenDigest)

    def take(self, response: gateway_pb2.GatewayGenerateResponse) -> gateway_pb2.GatewayGenerateResponse | None:
        """Returns the new part of a message; None if nothing is new.

        Raises:
            UnavailableError: Tokens are missing before those of the message.
            ResumeMismatchError: A restarted stream brings another text.
        """
        self.session_id = response.session_id
        expected = self.num_tokens - self.skip_tokens
        if response.token_ids and response.offset != expected:
            raise UnavailableError(f"the gateway sent token {response.offset} where {expected} was to come")
        token_ids = response.token_ids[self.skip_tokens :]
        text = response.text[self.skip_chars :]
        self._skip(response.token_ids[: len(response.token_ids) - len(token_ids)])
        self.skip_chars -= len(response.text) - len(text)
        self.digest.add(token_ids)
        self.num_tokens += len(token_ids)
        self.num_chars += len(text)
        if not token_ids and not text and not response.HasField("result"):
            return None
        new = gateway_pb2.GatewayGenerateResponse(session_id=response.session_id, text=text, token_ids=token_ids)
        if response.HasField("result"):
            new.result.CopyFrom(response.result)
        return new

    def _skip(self, token_ids: Sequence[int]) -> None:
        self.skipped.add(token_ids)
        self.skip_tokens -= len(token_ids)
        if token_ids and not self.skip_tokens and self.skipped.hex() != self.digest.hex():
            raise ResumeMismatchError("the restarted stream brings other tokens than before")

    def begin_anew(self) -> None:
        """Starts over, as the session is lost: the same seed gives the same tokens, of which the first are known."""
        self.session_id = ""
        self.skip_tokens, self.skip_chars, self.skipped = self.num_tokens, self.num_chars, TokenDigest()

    def resume(self) -> gateway_pb2.ResumeRequest:
        """Returns a request for the missing part; no known token is sent again, however far a restart had come."""
        self.skip_tokens = self.skip_chars = 0
        digest = self.digest.hex() if self.num_tokens else ""
        return gateway_pb2.ResumeRequest(session_id=self.session_id, offset=self.num_tokens, digest=digest)

    def wait_s(self, error: PacelineError) -> float:
        """Returns the seconds after which to try again.

        Raises:
            PacelineError: The error itself, if a retry is pointless.
        """
        match error:
            case OverloadedError() if self.num_tokens or self.num_chars or self.session_id:
                # A session that has begun waits for a place; the caller may send a new one again.
                return error.retry_after_s
            case UnavailableError() | StaleEpochError():
                return 0.0
            case _:
                raise error


class ResumingClient:
    """Calls gateways; an async context manager.

    Args:
        addresses: gRPC addresses of gateways, `host:port`.
        api_key: Sent with every call; empty: none.
        ca: PEM certificates of the authorities that sign the gateways'; None: plain text.
        patience_s: How long to keep trying without a new token, in seconds.
        silence_s: Longest wait for the next message of a stream, in seconds. Long, since streams may queue; gRPC's
            pings detect dead or frozen gateways sooner.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        api_key: str = "",
        ca: bytes | None = None,
        patience_s: float = 60.0,
        silence_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channels = [_channel(address, ca) for address in addresses]
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._turns = itertools.count()
        self._patience_s = patience_s
        self._silence_s = silence_s
        self._clock = clock
        self.num_resumed = 0

    async def __aenter__(self) -> ResumingClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close(None)

    async def stream(
        self, request: gateway_pb2.GatewayGenerateRequest
    ) -> AsyncGenerator[gateway_pb2.GatewayGenerateResponse, None]:
        """Yields the pieces of one completion, its result in the last; closing it cancels the call.

        Raises:
            InvalidRequestError: The request has no sampling parameters to put a seed into.
            SessionNotFoundError: The session is lost, and its acceptance rule would not give the same tokens again.
            OverloadedError: No gateway has a place for a new session now; says when to retry.
            ResumeMismatchError: The session, or a restarted stream, has other tokens than it brought before.
            PacelineError: A gateway refused the request.
            UnavailableError: No gateway brought a new token for `patience_s` seconds.
        """
        request = _repeatable(request)
        progress = Progress()
        until_s = self._clock() + self._patience_s
        pause_s = FIRST_PAUSE_S
        turn = next(self._turns)
        while True:
            try:
                async with aclosing(self._attempt(request, progress, turn)) as pieces:
                    async for piece in pieces:
                        until_s, pause_s = self._clock() + self._patience_s, FIRST_PAUSE_S
                        yield piece
                return
            except SessionNotFoundError:
                if progress.num_tokens and request.speculation.acceptance != COUPLED:
                    raise
                progress.begin_anew()
            except PacelineError as error:
                pause_s = max(pause_s, progress.wait_s(error))
                if self._clock() >= until_s:
                    raise UnavailableError(f"no gateway has brought a token in time; the last said: {error}") from error
                self.num_resumed += bool(progress.session_id)
            # Clients that lost the same gateway must not all return at the same moment.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
            turn += 1

    async def _attempt(
        self, request: gateway_pb2.GatewayGenerateRequest, progress: Progress, turn: int
    ) -> AsyncGenerator[gateway_pb2.GatewayGenerateResponse, None]:
        """Yields what one gateway sends."""
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(
            self._channels[turn % len(self._channels)]
        )
        resumes = bool(progress.session_id)
        call: _Call = (
            stub.Resume(progress.resume(), metadata=self._metadata)
            if resumes
            else stub.Generate(request, metadata=self._metadata)
        )
        finished = False
        try:
            while not finished:
                message = await self._read(call)
                finished = message.HasField("result")
                new = progress.take(message)
                if new is not None:
                    yield new
        finally:
            call.cancel()

    async def _read(self, call: _Call) -> gateway_pb2.GatewayGenerateResponse:
        try:
            async with asyncio.timeout(self._silence_s):
                message = await call.read()
        except TimeoutError:
            raise UnavailableError(f"the gateway was silent for {self._silence_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        if not isinstance(message, gateway_pb2.GatewayGenerateResponse):
            raise UnavailableError("the gateway ended the stream without a result")
        return message


def _channel(address: str, ca: bytes | None) -> grpc.aio.Channel:
    if ca is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options=_OPTIONS)


def _repeatable(request: gateway_pb2.GatewayGenerateRequest) -> gateway_pb2.GatewayGenerateRequest:
    """Returns the request with a seed, and the coupled rule unless it names another, so that a restart repeats it."""
    if not request.HasField("sampling"):
        raise InvalidRequestError("sampling", "is required: it holds the seed with which a lost stream restarts")
    seeded = gateway_pb2.GatewayGenerateRequest()
    seeded.CopyFrom(request)
    if not seeded.sampling.HasField("seed"):
        seeded.sampling.seed = secrets.randbits(64)
    if not seeded.HasField("speculation"):
        seeded.speculation.enabled = True
    seeded.speculation.acceptance = seeded.speculation.acceptance or COUPLED
    return seeded
