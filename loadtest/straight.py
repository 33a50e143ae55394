"""A client that goes straight to a verifier over gRPC, as gateways do; it is cheap, and no gateway is measured."""

from __future__ import annotations

import itertools
import time

from loadtest.streams import Ask, Completion, Door
from paceline.core.messages import GenerateRequest, SessionEvent
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.gateway.fleet.verifier_client import VerifierClient

SILENCE_S = 600.0
# Vocabulary of any model: nothing is checked here.
VOCAB_SIZE = 2**31


class StraightDoor(Door):
    """`Verifier.Verify`, one stream for all sessions as a gateway has it: prompts are token ids, a piece is a token.

    Args:
        address: The verifier's address.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._client = VerifierClient(SILENCE_S)
        self._numbers = itertools.count()

    async def _stream(self, ask: Ask, done: Completion, origin_s: float) -> None:
        request = GenerateRequest(
            session_id=f"bench-{next(self._numbers)}",
            epoch=1,
            prompt_token_ids=tuple(map(int, ask.prompt)),
            sampling=SamplingParams(max_tokens=ask.max_tokens, temperature=0.0, ignore_eos=True),
            speculation=SpeculationParams(**(ask.speculation or {})),
        )
        tokens: list[tuple[float, tuple[int, ...]]] = []

        def take(token_ids: tuple[int, ...], _: bytes, __: SessionEvent) -> bool:
            tokens.append((time.perf_counter() - origin_s, token_ids))
            return False

        await self._client.run(self._client.running(self._address, request, VOCAB_SIZE, take))
        done.counts = [(at_s, len(token_ids)) for at_s, token_ids in tokens if token_ids]
        done.pieces = [(at_s, 1) for at_s, token_ids in tokens for _ in token_ids]
        done.text = " ".join(str(token_id) for _, token_ids in tokens for token_id in token_ids)
        done.num_tokens, done.ended_s = len(done.pieces), tokens[-1][0]

    async def close(self) -> None:
        """Ends the stream."""
        await self._client.close()
