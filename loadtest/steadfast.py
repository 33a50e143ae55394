"""Streams that are compared token by token with what they should be, and timed, while a fleet is disturbed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import PacelineError
from paceline.resuming import ResumingClient
from paceline.rpc.v1 import common_pb2, gateway_pb2
from paceline.training.corpus import unseen_prompts

Request = gateway_pb2.GatewayGenerateRequest
NUM_PROMPTS = 40


@dataclass(slots=True)
class Stream:
    """One completion as its client saw it; times are of `time.perf_counter`, one a piece."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    piece_lens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    # Of the verifier that ended it; after a failover that is what had to be computed again.
    prefill_s: float = 0.0
    error: str = ""

    def pause_after(self, at_s: float, within_s: float = 0.25) -> float | None:
        """The longest gap between pieces that began at most `within_s` after a time; None if it did not run then."""
        gaps = zip(self.times_s, self.times_s[1:], strict=False)
        around = [end - start for start, end in gaps if start <= at_s + within_s and end > at_s]
        return max(around, default=None)


def mixed_requests(count: int, max_tokens: int, method: str = "") -> list[Request]:
    """Requests of which every other one is sampled, with penalties; each has a prompt or a seed of its own."""
    prompts = unseen_prompts(min(count, NUM_PROMPTS))
    return [_request(prompts[index % len(prompts)], index, max_tokens, method) for index in range(count)]


def _request(prompt: str, index: int, max_tokens: int, method: str) -> Request:
    sampled = index % 2
    sampling = common_pb2.SamplingParams(
        max_tokens=max_tokens,
        temperature=0.8 if sampled else 0.0,
        top_p=0.95 if sampled else 1.0,
        repetition_penalty=1.05 if sampled else 1.0,
        presence_penalty=0.2 if sampled else 0.0,
        ignore_eos=True,
        seed=index,
    )
    speculation = common_pb2.SpeculationParams(enabled=True, acceptance="coupled", method=method)
    return Request(prompt=prompt, sampling=sampling, speculation=speculation)


async def run_one(
    client: ResumingClient, request: Request, index: int, on_piece: Callable[[Stream], None] = lambda _: None
) -> Stream:
    """Runs a request to its end; an error is kept in the stream."""
    stream = Stream(index=index)
    try:
        async for piece in client.stream(request):
            if piece.token_ids:
                stream.token_ids += piece.token_ids
                stream.piece_lens.append(len(piece.token_ids))
                stream.times_s.append(time.perf_counter())
                on_piece(stream)
            if piece.HasField("result"):
                stream.prefill_s = piece.result.timings.prefill_ns / 1e9
    except PacelineError as error:
        stream.error = f"{type(error).__name__}: {error}"
    return stream


async def run_each(client: ResumingClient, requests: Sequence[Request], on_end: Callable[[], None]) -> list[Stream]:
    """Runs all requests at once, each to its end."""

    async def one(index: int) -> Stream:
        stream = await run_one(client, requests[index], index)
        on_end()
        return stream

    return await asyncio.gather(*(one(index) for index in range(len(requests))))


async def keep_running(
    client: ResumingClient, requests: Sequence[Request], is_over: Callable[[], bool], on_end: Callable[[Stream], None]
) -> list[Stream]:
    """Runs each request again and again, all side by side, until it is over; those under way then run to their end."""

    async def again(index: int) -> list[Stream]:
        streams: list[Stream] = []
        while not streams or not is_over():
            streams.append(await run_one(client, requests[index], index))
            on_end(streams[-1])
        return streams

    runs = await asyncio.gather(*(again(index) for index in range(len(requests))))
    return [stream for run in runs for stream in run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """How streams differ from what they should be, in tokens; all 0 is none."""

    num_failed: int
    num_lost: int
    num_doubled: int
    num_changed: int

    @property
    def none(self) -> bool:
        """Whether every token came once and as it should."""
        return not (self.num_failed or self.num_lost or self.num_doubled or self.num_changed)


def damage(streams: Sequence[Stream], reference: Sequence[Sequence[int]]) -> Damage:
    """Compares streams with the tokens that their requests should bring."""
    failed = [stream for stream in streams if stream.error]
    whole = [(stream.token_ids, reference[stream.index]) for stream in streams if not stream.error]
    return Damage(
        num_failed=len(failed),
        num_lost=sum(max(0, len(wanted) - len(got)) for got, wanted in whole),
        num_doubled=sum(max(0, len(got) - len(wanted)) for got, wanted in whole),
        num_changed=sum(a != b for got, wanted in whole for a, b in zip(got, wanted, strict=False)),
    )
