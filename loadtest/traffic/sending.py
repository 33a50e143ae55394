"""Sends the requests of a window when they are due, whether earlier ones have ended or not, and keeps every time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from loadtest.streams import GrpcWay, HttpWay, Streamed, StreamError
from loadtest.traffic.config import HTTP, OFF
from loadtest.traffic.plan import Request
from paceline.rpc.v1 import common_pb2, gateway_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one request. Times are seconds after its window began.

    Attributes:
        sent_s: When it was really sent; `due_s` when it should have been.
        ended_s: When its last byte or its error came.
        counts: When tokens came, and how many at once.
        error: What kind of error ended it; empty: none.
    """

    index: int
    due_s: float
    sent_s: float
    ended_s: float
    counts: tuple[tuple[float, int], ...] = ()
    text: str = ""
    num_prompt_tokens: int = 0
    record: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    message: str = ""

    @property
    def late_s(self) -> float:
        """How late the sender was."""
        return self.sent_s - self.due_s

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(count for _, count in self.counts)

    @property
    def ttft_s(self) -> float:
        """Time to the first token, from sending; only of a request that got one."""
        return self.counts[0][0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        """Time to the last byte, from sending."""
        return self.ended_s - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Time between tokens, `[tokens - those of the first piece]`: tokens that came at once share their wait.

        This is how AIPerf counts, too. The first piece waited for the prompt, so none of its tokens has a gap.
        """
        pieces: dict[float, int] = {}
        for at_s, count in self.counts:
            pieces[at_s] = pieces.get(at_s, 0) + count
        return [
            (later_s - sooner_s) / count
            for (sooner_s, _), (later_s, count) in pairwise(pieces.items())
            for _ in range(count)
        ]


class Door(Protocol):
    """One door of a gateway."""

    async def ask(self, request: Request) -> Streamed:
        """Streams one completion; raises `StreamError` when it is refused or breaks off."""
        ...

    async def close(self) -> None:
        """Closes connections."""
        ...


class HttpDoor:
    """`/v1/completions` with server-sent events; usage in every event says how many tokens each brings."""

    def __init__(self, url: str, mode: str) -> None:
        self._way = HttpWay(url)
        self._speculation = {"enabled": False} if mode == OFF else {}

    async def ask(self, request: Request) -> Streamed:
        """See `Door`."""
        return await self._way.stream(
            {
                "prompt": request.prompt,
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "seed": request.seed,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
                "speculation": self._speculation,
            }
        )

    async def close(self) -> None:
        """See `Door`; each stream has closed its own connection."""


class GrpcDoor:
    """`Gateway.Generate`."""

    def __init__(self, address: str, mode: str) -> None:
        self._way = GrpcWay(address)
        self._speculation = common_pb2.SpeculationParams(enabled=False) if mode == OFF else None

    async def ask(self, request: Request) -> Streamed:
        """See `Door`."""
        sampling = common_pb2.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=1.0,
            repetition_penalty=1.0,
            seed=request.seed,
            ignore_eos=True,
        )
        return await self._way.stream(
            gateway_pb2.GatewayGenerateRequest(prompt=request.prompt, sampling=sampling, speculation=self._speculation)
        )

    async def close(self) -> None:
        """See `Door`."""
        await self._way.close()


def open_door(kind: str, address: str, mode: str) -> Door:
    """Returns a door: of a URL for HTTP, of host and port for gRPC."""
    return HttpDoor(address, mode) if kind == HTTP else GrpcDoor(address, mode)


async def replay(
    door: Door, requests: Sequence[Request], on_answer: Callable[[Answer], None] = lambda _: None
) -> list[Answer]:
    """Sends all requests when they are due and returns when each has been answered, in their order."""
    started_s = time.perf_counter()

    async def one(request: Request) -> Answer:
        await asyncio.sleep(max(0.0, started_s + request.due_s - time.perf_counter()))
        sent_s = time.perf_counter() - started_s
        answer = _answer(request, sent_s, started_s, await _outcome(door, request))
        on_answer(answer)
        return answer

    return await asyncio.gather(*(one(request) for request in requests))


async def _outcome(door: Door, request: Request) -> Streamed | StreamError:
    try:
        return await door.ask(request)
    except StreamError as error:
        return error
    except TimeoutError:
        return StreamError("timed out", "no end within the time a stream may take")
    except OSError as error:
        return StreamError("no connection", str(error))


def _answer(request: Request, sent_s: float, started_s: float, outcome: Streamed | StreamError) -> Answer:
    if isinstance(outcome, StreamError):
        return Answer(
            index=request.index,
            due_s=request.due_s,
            sent_s=sent_s,
            ended_s=time.perf_counter() - started_s,
            error=outcome.kind,
            message=str(outcome),
        )
    counts = tuple((at_s - started_s, count) for at_s, count in outcome.counts)
    num_tokens = sum(count for _, count in counts)
    short = "" if num_tokens == request.max_tokens else "short answer"
    return Answer(
        index=request.index,
        due_s=request.due_s,
        sent_s=sent_s,
        ended_s=outcome.ended_s - started_s,
        counts=counts,
        text=outcome.text,
        num_prompt_tokens=outcome.num_prompt_tokens,
        record=outcome.record,
        error=short,
        message=f"{num_tokens} of {request.max_tokens} tokens" if short else "",
    )
