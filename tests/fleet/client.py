"""A gRPC client of the gateway that keeps token ids: equality is asserted token by token, not text by text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc

from paceline.rpc.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from paceline.service.process import CHANNEL_OPTIONS
from tests.support.fleet_runner import FleetRunner


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """A sampled completion with penalties; gamma 0 is plain decoding."""

    prompt: str
    seed: int
    gamma: int = 0
    max_tokens: int = 48

    def message(self) -> gateway_pb2.GatewayGenerateRequest:
        return gateway_pb2.GatewayGenerateRequest(
            prompt=self.prompt,
            sampling=common_pb2.SamplingParams(
                max_tokens=self.max_tokens,
                temperature=0.8,
                top_p=0.95,
                repetition_penalty=1.05,
                presence_penalty=0.2,
                frequency_penalty=0.1,
                ignore_eos=True,
                seed=self.seed,
            ),
            speculation=common_pb2.SpeculationParams(
                enabled=self.gamma > 0, max_draft_tokens=self.gamma, acceptance="coupled"
            ),
        )


async def sample(runner: FleetRunner, ask: Sampled, on_piece: Callable[[], None] = lambda: None) -> list[int]:
    """Token ids of one completion."""
    tokens: list[int] = []
    async with grpc.aio.insecure_channel(
        runner.fleet.endpoint("gateway").second_address, options=CHANNEL_OPTIONS
    ) as channel:
        stub: gateway_pb2_grpc.GatewayAsyncStub = gateway_pb2_grpc.GatewayStub(channel)
        async for piece in stub.Generate(ask.message(), timeout=120):
            tokens += piece.token_ids
            on_piece()
    assert len(tokens) == ask.max_tokens
    return tokens


def sample_all(runner: FleetRunner, asks: Sequence[Sampled], concurrency: int) -> list[list[int]]:
    """Token ids of many completions, so many at a time."""

    async def all_of_them() -> list[list[int]]:
        gate = asyncio.Semaphore(concurrency)

        async def one(ask: Sampled) -> list[int]:
            async with gate:
                return await sample(runner, ask)

        return await asyncio.gather(*map(one, asks))

    return asyncio.run(all_of_them())
