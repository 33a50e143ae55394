"""A streaming client for both doors of a gateway that keeps the time of every piece.

While a stream runs it only notes when bytes came, and reads them afterwards: it shares the cores of what it measures.
All times are seconds after a moment that the caller chooses.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast
from urllib.parse import urlsplit

import grpc

from paceline.core.addresses import host_port
from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from paceline.service.process import CHANNEL_OPTIONS

TIMEOUT_S = 600.0
# Usage in every event says how many tokens each brings.
COUNTED: Mapping[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
RECORDED = ("num_steps", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_batch_size")
_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request.

    Attributes:
        prompt: Text, or token ids (over HTTP only).
        speculation: None leaves the defaults to the gateway.
        more: Further fields of the body; they replace those written here.
        index: Its number in a replay.
        due_s: When a replay is to send it.
    """

    prompt: str | Sequence[int]
    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 1
    speculation: Mapping[str, Any] | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0
    due_s: float = 0.0

    def body(self) -> dict[str, Any]:
        """The JSON body of `/v1/completions`."""
        names = ("prompt", "max_tokens", "temperature", "top_p", "seed")
        body: dict[str, Any] = {name: getattr(self, name) for name in names}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        if self.speculation is not None:
            body["speculation"] = self.speculation
        return {**body, **self.more}

    def message(self) -> gateway_pb2.GatewayGenerateRequest:
        """The same for the gRPC door."""
        sampling = common_pb2.SamplingParams(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            repetition_penalty=1.0,
            seed=self.seed,
            ignore_eos=True,
        )
        speculation = None if self.speculation is None else common_pb2.SpeculationParams(**self.speculation)
        return gateway_pb2.GatewayGenerateRequest(prompt=str(self.prompt), sampling=sampling, speculation=speculation)


@dataclass(slots=True, kw_only=True)
class Completion:
    """The outcome of a request.

    Attributes:
        index, due_s: From its `Ask`.
        started_s: When it was sent.
        ended_s: When its last byte or its error came.
        pieces: When text came, and how many characters at once.
        counts: When tokens came, and how many at once; over HTTP only if the request asks for continuous usage.
        record: Speculation counts.
        error: Kind of error that ended it; empty: none.
        message: More about the error.
    """

    index: int = 0
    due_s: float = 0.0
    started_s: float = 0.0
    ended_s: float = 0.0
    pieces: Sequence[tuple[float, int]] = ()
    counts: Sequence[tuple[float, int]] = ()
    text: str = ""
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    message: str = ""

    @property
    def late_s(self) -> float:
        """How late it was sent."""
        return self.started_s - self.due_s

    @property
    def ttft_s(self) -> float:
        """Time to the first token, from sending; only of a request that got one."""
        return self.counts[0][0] - self.started_s

    @property
    def e2e_s(self) -> float:
        """Time to the last byte, from sending."""
        return self.ended_s - self.started_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between pieces of text."""
        return [later - sooner for (sooner, _), (later, _) in pairwise(self.pieces)]

    @property
    def token_gaps_s(self) -> list[float]:
        """Time between tokens, `[tokens - those of the first piece]`: tokens that came at once share their wait.

        This is how AIPerf counts, too. The first piece waited for the prompt, so none of its tokens has a gap.
        """
        counts: dict[float, int] = {}
        for at_s, count in self.counts:
            counts[at_s] = counts.get(at_s, 0) + count
        return [
            (later_s - sooner_s) / count
            for (sooner_s, _), (later_s, count) in pairwise(counts.items())
            for _ in range(count)
        ]

    @property
    def decode_s(self) -> float:
        """Seconds from the first piece to the last."""
        return self.pieces[-1][0] - self.pieces[0][0]

    def tokens_until(self, time_s: float) -> float:
        """Tokens that had come by then, by their share of the text."""
        chars = sum(count for at_s, count in self.pieces if at_s <= time_s)
        return self.num_tokens * chars / max(1, sum(count for _, count in self.pieces))


class StreamError(Exception):
    """A stream was refused or broke off; `kind` tells such errors apart in few words."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Door(ABC):
    """A door of a gateway."""

    async def ask(
        self, ask: Ask, origin_s: float = 0.0, *, into: Completion | None = None, timeout_s: float = TIMEOUT_S
    ) -> Completion:
        """Streams one completion to its end; an error is part of what it returns.

        Args:
            ask: The request to send.
            origin_s: The moment from which times count, by `time.perf_counter`.
            into: Gets what came; over gRPC also of a call that is cancelled.
        """
        done = into or Completion()
        done.index, done.due_s, done.started_s = ask.index, ask.due_s, time.perf_counter() - origin_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream(ask, done, origin_s)
        except StreamError as error:
            done.error, done.message = error.kind, str(error)
        except TimeoutError:
            done.error, done.message = "timed out", f"no end within {timeout_s:g} s"
        except OSError as error:
            done.error, done.message = "no connection", str(error)
        if done.error:
            done.ended_s = time.perf_counter() - origin_s
        return done

    @abstractmethod
    async def _stream(self, ask: Ask, done: Completion, origin_s: float) -> None:
        """Fills in what came."""

    async def close(self) -> None:  # noqa: B027 - most doors keep nothing open
        """Closes connections."""


class HttpDoor(Door):
    """Completions over HTTP and server-sent events; each stream has a connection of its own.

    Args:
        url: URL of the gateway, `http://host:port`.
        more: Fields of every body.
    """

    def __init__(self, url: str, more: Mapping[str, Any] | None = None):
        parts = urlsplit(url)
        self._host, self._port = str(parts.hostname), int(parts.port or 80)
        self._more = more or {}

    async def _stream(self, ask: Ask, done: Completion, origin_s: float) -> None:
        payload = json.dumps({**ask.body(), **self._more}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host_port(self._host, self._port)}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
        )
        _, connection = await asyncio.get_running_loop().create_connection(_Connection, self._host, self._port)
        try:
            # Connecting is not counted.
            done.started_s = time.perf_counter() - origin_s
            arrived = await connection.ask(head.encode() + payload)
        finally:
            connection.close()
        _read([(at_s - origin_s, data) for at_s, data in arrived], done)


class _Connection(asyncio.Protocol):
    """An HTTP/1.1 connection for one request."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._arrived: list[tuple[float, bytes]] = []
        self._tail = b""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        # uvloop's transport is one in all but its base class.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Notes what came and when; the end may be split over two pieces."""
        self._arrived.append((time.perf_counter(), data))
        self._tail = (self._tail + data)[-64:]
        # A chunked body ends with an empty chunk; an error has a body of known length that is not worth parsing.
        over = self._tail.endswith(b"\r\n0\r\n\r\n") or not self._arrived[0][1].startswith(b"HTTP/1.1 200")
        if over and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Ends the request under way."""
        if not self._ended.done():
            self._ended.set_exception(error or ConnectionError("the gateway closed the connection"))

    async def ask(self, request: bytes) -> Sequence[tuple[float, bytes]]:
        """Sends a request and returns what came back, with times."""
        assert self._transport is not None, "a connection is made before it is used"
        self._transport.write(request)
        await self._ended
        return self._arrived

    def close(self) -> None:
        """Closes the connection."""
        if not self._ended.done():
            self._ended.cancel()
        if self._transport is not None:
            self._transport.close()


def _read(arrived: Sequence[tuple[float, bytes]], done: Completion) -> None:
    """Finds the events in what came."""
    whole = b"".join(data for _, data in arrived)
    if not whole.startswith(b"HTTP/1.1 200") or _DONE not in whole:
        status = whole[len(b"HTTP/1.1 ") :][:3].decode(errors="replace")
        kind = "broke off" if status == "200" else f"status {status}"
        raise StreamError(kind, f"the gateway answered {whole[:500].decode(errors='replace')!r}")
    pieces: list[tuple[float, int]] = []
    counts: list[tuple[float, int]] = []
    texts: list[str] = []
    for at_s, event in _events(arrived):
        if "error" in event:
            raise StreamError("broke off", f"the gateway broke off: {event['error']}")
        if text := "".join(choice.get("text", "") for choice in event["choices"]):
            texts.append(text)
            pieces.append((at_s, len(text)))
        if usage := event.get("usage"):
            if usage["completion_tokens"] > done.num_tokens:
                counts.append((at_s, usage["completion_tokens"] - done.num_tokens))
            done.num_tokens, done.num_prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        if event.get("metrics"):
            done.record = event["metrics"]["speculative_decoding"]
    done.text, done.pieces, done.counts, done.ended_s = "".join(texts), pieces, counts, arrived[-1][0]


def _events(arrived: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    rest = b""
    for at_s, data in arrived:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield at_s, json.loads(line[len(b"data: ") :])


class GrpcDoor(Door):
    """`Gateway.Generate`, one channel for all calls."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(self._channel)

    async def _stream(self, ask: Ask, done: Completion, origin_s: float) -> None:
        arrived: list[tuple[float, gateway_pb2.GatewayGenerateResponse]] = []
        try:
            async for response in self._stub.Generate(ask.message()):
                arrived.append((time.perf_counter() - origin_s, response))
        except grpc.aio.AioRpcError as error:
            raise StreamError(error.code().name, f"{error.code().name}: {error.details()}") from None
        finally:
            done.pieces = [(at_s, len(response.text)) for at_s, response in arrived if response.text]
            done.counts = [(at_s, len(response.token_ids)) for at_s, response in arrived if response.token_ids]
            done.num_tokens = sum(count for _, count in done.counts)
        done.ended_s, last = arrived[-1]
        done.text = "".join(response.text for _, response in arrived)
        done.num_prompt_tokens = last.result.num_prompt_tokens
        done.record = {name: getattr(last.result.speculation, name) for name in RECORDED}

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)
