"""Lean ways to stream a completion, through the gateway's doors, HTTP and gRPC, and straight from a verifier.

They only note when bytes came and look into them afterwards, so that the load generator takes as little of a small
machine as it can.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import grpc

from paceline.core.messages import VERIFIER, GenerateRequest
from paceline.rpc.v1 import gateway_pb2, gateway_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from paceline.service.credentials import channel
from paceline.service.process import CHANNEL_OPTIONS
from paceline.wire import committed_from_pb, generate_request_to_pb

TIMEOUT_S = 300.0
RECORDED = ("num_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_batch_size")
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One stream, with times of `time.perf_counter`.

    Attributes:
        started_s: When the request was sent.
        times_s: When each piece came.
        text: All of it, as far as the way carries text.
        token_ids: All of them, as far as the way carries tokens.
        ended_s: When the last byte came.
        counts: When tokens came and how many at once; over HTTP only if the request asks for continuous usage.
        num_prompt_tokens: Tokens of the prompt, as far as the way tells.
        record: What speculation did, as far as the way tells.
    """

    started_s: float
    times_s: tuple[float, ...]
    ended_s: float
    text: str = ""
    token_ids: tuple[int, ...] = ()
    counts: tuple[tuple[float, int], ...] = ()
    num_prompt_tokens: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def per_token_s(self) -> float:
        """Time per output token after the first, which comes alone; pieces where nobody told of tokens."""
        num_tokens = len(self.token_ids) or sum(count for _, count in self.counts) or len(self.times_s)
        return (self.times_s[-1] - self.times_s[0]) / (num_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces."""
        return [later - sooner for sooner, later in zip(self.times_s, self.times_s[1:], strict=False)]


class StreamError(RuntimeError):
    """A stream was refused or broke off; `kind` tells such errors apart in few words."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class DirectWay:
    """Streams from a verifier over gRPC, one channel for all calls, as a gateway does."""

    def __init__(self, address: str) -> None:
        self._channel = channel(address, tls=None, role=VERIFIER)
        self._stub: verifier_pb2_grpc.VerifierAsyncStub = verifier_pb2_grpc.VerifierStub(self._channel)

    async def stream(self, request: GenerateRequest) -> Streamed:
        """Runs one session to its end."""
        message = generate_request_to_pb(request)
        arrived: list[tuple[float, verifier_pb2.VerifierGenerateResponse]] = []
        started_s = time.perf_counter()
        async for response in self._stub.Generate(message, timeout=TIMEOUT_S):
            arrived.append((time.perf_counter(), response))
        ended_s = time.perf_counter()
        steps = [(at_s, committed_from_pb(response)) for at_s, response in arrived]
        return Streamed(
            started_s=started_s,
            times_s=tuple(at_s for at_s, step in steps for _ in step.token_ids),
            ended_s=ended_s,
            token_ids=tuple(token_id for _, step in steps for token_id in step.token_ids),
        )

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)


class GrpcWay:
    """Streams from a gateway over gRPC, one channel for all calls."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def stream(self, request: gateway_pb2.GatewayGenerateRequest) -> Streamed:
        """Runs one completion to its end.

        Raises:
            StreamError: The gateway refused it or broke it off; the kind is gRPC's status.
        """
        arrived: list[tuple[float, gateway_pb2.GatewayGenerateResponse]] = []
        started_s = time.perf_counter()
        try:
            async for response in self._stub.Generate(request, timeout=TIMEOUT_S):
                arrived.append((time.perf_counter(), response))
        except grpc.aio.AioRpcError as error:
            raise StreamError(error.code().name, f"{error.code().name}: {error.details()}") from None
        result = arrived[-1][1].result
        return Streamed(
            started_s=started_s,
            times_s=tuple(at_s for at_s, response in arrived if response.text),
            ended_s=arrived[-1][0],
            text="".join(response.text for _, response in arrived),
            token_ids=tuple(token_id for _, response in arrived for token_id in response.token_ids),
            counts=tuple((at_s, len(response.token_ids)) for at_s, response in arrived if response.token_ids),
            num_prompt_tokens=result.num_prompt_tokens,
            record={name: getattr(result.speculation, name) for name in RECORDED},
        )

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)


class HttpWay:
    """Streams from a gateway over HTTP and server-sent events; each stream has a connection of its own."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)

    async def stream(self, body: dict[str, Any]) -> Streamed:
        """Runs one completion to its end; connecting is not counted.

        Raises:
            StreamError: The gateway refused it or broke it off; the message is its answer.
        """
        payload = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}:{self._port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_SseConnection, self._host, self._port)
        try:
            started_s = time.perf_counter()
            async with asyncio.timeout(TIMEOUT_S):
                arrived = await connection.ask(head.encode() + payload)
        finally:
            connection.close()
        return _read(started_s, arrived)


class _SseConnection(asyncio.Protocol):
    """One HTTP/1.1 connection for one request."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._arrived: list[tuple[float, bytes]] = []
        self._tail = b""
        self._ended: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        # uvloop's transport is one in all but its base class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Notes what came and when; the end may be split over two pieces."""
        self._arrived.append((time.perf_counter(), data))
        self._tail = (self._tail + data)[-64:]
        # A chunked body ends with an empty chunk; an error has a body of known length that is not worth parsing.
        if self._tail.endswith(b"\r\n0\r\n\r\n") or not self._arrived[0][1].startswith(b"HTTP/1.1 200"):
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the request under way."""
        self._end(error or ConnectionError("the gateway closed the connection"))

    async def ask(self, request: bytes) -> Sequence[tuple[float, bytes]]:
        """Sends a request and returns what came back, with times."""
        assert self._transport is not None, "a connection is made before it is used"
        self._arrived, self._tail = [], b""
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended
        return self._arrived

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()

    def _end(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


def _read(started_s: float, arrived: Sequence[tuple[float, bytes]]) -> Streamed:
    """Finds the events in what came; each lies in a chunk of its own."""
    whole = b"".join(data for _, data in arrived)
    if not whole.startswith(b"HTTP/1.1 200") or _DONE not in whole:
        status = whole[len(b"HTTP/1.1 ") :][:3].decode(errors="replace")
        kind = "broke off" if status == "200" else f"status {status}"
        raise StreamError(kind, f"the gateway answered {whole[:500].decode(errors='replace')!r}")
    events = list(_events(arrived))
    texts = [(at_s, text) for at_s, event in events if (text := _text_of(event))]
    usages = [(at_s, event["usage"]) for at_s, event in events if event.get("usage")]
    totals = [0, *(usage["completion_tokens"] for _, usage in usages)]
    return Streamed(
        started_s=started_s,
        times_s=tuple(at_s for at_s, _ in texts),
        ended_s=arrived[-1][0],
        text="".join(text for _, text in texts),
        counts=tuple(
            (at_s, total - before)
            for (at_s, _), before, total in zip(usages, totals, totals[1:], strict=False)
            if total > before
        ),
        num_prompt_tokens=usages[-1][1]["prompt_tokens"] if usages else 0,
        record=next((event["metrics"]["speculative_decoding"] for _, event in events if event.get("metrics")), {}),
    )


def _events(arrived: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    rest = b""
    for at_s, data in arrived:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield at_s, json.loads(line[len(b"data: ") :])


def _text_of(event: dict[str, Any]) -> str:
    if "error" in event:
        raise StreamError("broke off", f"the gateway broke off: {event['error']}")
    return "".join(choice.get("text", "") for choice in event["choices"])
