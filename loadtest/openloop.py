"""New requests at a steady or a random rate, whether earlier ones have ended or not, over a gateway's gRPC door."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import grpc
from tqdm import tqdm

from paceline.checkpoints.corpus import unseen_prompts
from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from paceline.service.process import CHANNEL_OPTIONS

TIMEOUT_S = 120.0
NUM_PROMPTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked for.

    Attributes:
        seed: Of random arrivals (a Poisson process); None: evenly spaced.
    """

    num_requests: int
    rate_per_s: float
    max_tokens: int
    seed: int | None = None

    def arrivals_s(self) -> list[float]:
        """When each request is due, in seconds after the first."""
        if self.seed is None:
            return [index / self.rate_per_s for index in range(self.num_requests)]
        chance = random.Random(self.seed)
        return list(accumulate(chance.expovariate(self.rate_per_s) for _ in range(self.num_requests)))


@dataclass(slots=True)
class Opened:
    """One request: when its first token came after it was sent, in seconds, its tokens, and its error's status."""

    first_token_s: float = 0.0
    num_generated: int = 0
    num_tokens: int = 0
    ended_s: float = 0.0
    code: str = ""
    error: str = ""


async def open_loop(address: str, load: Load, title: str) -> Sequence[Opened]:
    """Sends all requests when they are due and returns when each has been answered."""
    prompts = unseen_prompts(NUM_PROMPTS)
    started_s = time.perf_counter()
    with tqdm(total=load.num_requests, desc=title, unit="request", leave=False) as bar:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)

            async def one(index: int, due_s: float) -> Opened:
                await asyncio.sleep(max(0.0, started_s + due_s - time.perf_counter()))
                sampling = common_pb2.SamplingParams(max_tokens=load.max_tokens, ignore_eos=True, seed=index)
                request = gateway_pb2.GatewayGenerateRequest(prompt=prompts[index % len(prompts)], sampling=sampling)
                opened = await _run(stub, request)
                opened.ended_s = time.perf_counter() - started_s
                bar.update()
                return opened

            return await asyncio.gather(*(one(index, due_s) for index, due_s in enumerate(load.arrivals_s())))


async def _run(stub: gateway_pb2_grpc.GatewayAsyncStub, request: gateway_pb2.GatewayGenerateRequest) -> Opened:
    opened = Opened()
    sent_s = time.perf_counter()
    try:
        async for response in stub.Generate(request, timeout=TIMEOUT_S):
            if response.token_ids and not opened.num_generated:
                opened.first_token_s = time.perf_counter() - sent_s
            opened.num_generated += len(response.token_ids)
            if response.HasField("result"):
                opened.num_tokens = opened.num_generated + response.result.num_prompt_tokens
    except grpc.aio.AioRpcError as error:
        opened.code = error.code().name
        opened.error = f"{opened.code}: {error.details()}"
    return opened
