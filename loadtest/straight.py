"""A client that goes straight to a verifier over gRPC, as gateways do; it is cheap, and no gateway is measured."""

from __future__ import annotations

import itertools
import time

from loadtest.streams import Ask, Completion, Door
from paceline.core.messages import VERIFIER, GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.rpc.v1 import verifier_pb2_grpc
from paceline.service.credentials import channel
from paceline.wire import committed_from_pb, generate_request_to_pb


class StraightDoor(Door):
    """`Verifier.Generate`, one channel for all sessions; prompts are token ids, and a piece is a token.

    Args:
        address: Of the verifier.
    """

    def __init__(self, address: str) -> None:
        self._channel = channel(address, tls=None, role=VERIFIER)
        self._verifier: verifier_pb2_grpc.VerifierAsyncStub = verifier_pb2_grpc.VerifierStub(self._channel)
        self._numbers = itertools.count()

    async def _stream(self, ask: Ask, done: Completion, origin_s: float) -> None:
        request = GenerateRequest(
            session_id=f"bench-{next(self._numbers)}",
            epoch=1,
            prompt_token_ids=tuple(map(int, ask.prompt)),
            sampling=SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True),
            speculation=SpeculationParams(**(ask.speculation or {})),
        )
        stream = self._verifier.Generate(generate_request_to_pb(request))
        arrived = [(time.perf_counter() - origin_s, response) async for response in stream]
        tokens = [(at_s, committed_from_pb(response).token_ids) for at_s, response in arrived]
        done.counts = [(at_s, len(token_ids)) for at_s, token_ids in tokens if token_ids]
        done.pieces = [(at_s, 1) for at_s, token_ids in tokens for _ in token_ids]
        done.text = " ".join(str(token_id) for _, token_ids in tokens for token_id in token_ids)
        done.num_tokens, done.ended_s = len(done.pieces), arrived[-1][0]

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close(None)
