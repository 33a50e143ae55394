"""A whole fleet of which the verifier's card is real: for `loadtest.gpu`.

Gateway, verifier, drafter and Valkey are the processes that serve. The verifier's target computes every step of an 8B
of random weights on the card; its texts are those of a simulated target, so that simulated drafters can guess them.
The drafter takes the time that steps of a 1B took on the card, as if it had another one.

As a module it is the verifier of such a fleet, with the flags of `paceline verifier`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from loadtest.fleet import bench_fleet
from loadtest.gpu_models import SHAPES, RandomModel
from loadtest.gpu_parts import say
from loadtest.paced import OFF, ask_of, keep_busy, within
from loadtest.streams import Ask, HttpDoor
from paceline.cluster.local import LocalFleet
from paceline.engine.batch import Batch
from paceline.engine.decoder import Decoder
from paceline.engine.pending import Ranks, VerifyRequest
from paceline.planning.report import SETTLING
from paceline.simulated.device import DigestCache, Pace, SimulatedTarget, TextPending
from paceline.simulated.model import find_profile

STREAMS = (1, 8, 32)
MOST_ROWS = 512
SECONDS, MEAN_TOKENS, ACCEPTANCE = 8.0, 96, 0.8
# Times that a prompt says the same, for a context of some 600 tokens.
REPEATED = 60
# Which models and device: for trying this out where there is no card.
SHAPE, DEVICE = "GPU_CONTACT_SHAPE", "GPU_CONTACT_DEVICE"


def measure(profile: Path) -> None:
    """Tokens a second of the fleet at each number of streams, plain and with the tier, by turns.

    Args:
        profile: Profile of the measured steps; the drafter keeps to it.
    """
    if not profile.is_file():
        raise SystemExit(f"{profile}: there is none; the part `steps` comes first, and writes it")
    asyncio.run(_measure(profile))


async def _measure(profile: Path) -> None:
    launcher = {"modules": {"verifier": "loadtest.gpu_fleet"}}
    async with bench_fleet(simulate=str(profile), acceptance=ACCEPTANCE, launcher=launcher) as fleet:
        await _tokens_per_s(fleet, 8, None, 2.0)
        for streams in STREAMS:
            plain = await _tokens_per_s(fleet, streams, OFF, SECONDS)
            tier = await _tokens_per_s(fleet, streams, None, SECONDS)
            say(
                streams=streams,
                plain_tokens_per_s=round(plain, 1),
                tier_tokens_per_s=round(tier, 1),
                ratio=round(tier / plain, 3),
                imposed_acceptance=ACCEPTANCE,
                drafter=find_profile(str(profile)).drafter.name,
            )


async def _tokens_per_s(
    fleet: LocalFleet, streams: int, speculation: Mapping[str, Any] | None, seconds: float
) -> float:
    def make(number: int) -> Ask:
        ask = ask_of(number, MEAN_TOKENS, speculation)
        return replace(ask, prompt=str(ask.prompt) * REPEATED)

    door = HttpDoor(fleet.gateway_url)
    try:
        done = await keep_busy(door, make, streams, seconds)
    finally:
        await door.close()
    parts = [within(each, SETTLING * seconds, seconds) for each in done]
    return sum(count for part in parts for _, count in part.counts) / ((1 - SETTLING) * seconds)


class ComputedCache(DigestCache):
    """Digests, and the KV of the model that is computed, by the same slots."""

    def __init__(self, decoder: Decoder, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.computed = decoder.new_cache(num_blocks)
        decoder.prepare(MOST_ROWS, self.computed)

    def apply_moves(self, moves: list[tuple[int, int]]) -> None:
        """Moves both."""
        self.computed.apply_moves(list(moves))
        super().apply_moves(moves)


class ComputedTarget(SimulatedTarget):
    """A simulated target whose steps are computed: they take what they take."""

    def __init__(self, words: Any, pace: Pace, vocab_size: int) -> None:
        super().__init__(words, _NoPace(pace), vocab_size)
        shape = SHAPES[os.environ.get(SHAPE, "8b")][0]
        self._decoder = RandomModel(shape, torch.device(os.environ.get(DEVICE, "cuda"))).decoder()

    def new_cache(self, num_blocks: int) -> ComputedCache:
        return ComputedCache(self._decoder, num_blocks)

    def launch(self, batch: Batch, cache: DigestCache, wanted: VerifyRequest | Ranks | None) -> TextPending:
        """Computes the step, chooses its tokens on the device, and answers with those of the text."""
        assert isinstance(cache, ComputedCache), "of new_cache"
        pending = self._decoder.launch(batch, cache.computed, wanted)
        answered = super().launch(batch, cache, wanted)
        if isinstance(wanted, VerifyRequest):
            pending.follow(wanted)
        return answered


class _NoPace(Pace):
    """A simulated device that takes no time of its own."""

    def __init__(self, pace: Pace) -> None:
        self._given = pace

    def now_s(self) -> float:
        return self._given.now_s()

    def beside_drafters(self, work: bool) -> None:
        """It makes no difference."""

    def keep(self, started_s: float, *batches: Batch) -> None:
        """The step was computed."""


def main() -> None:
    """Runs the verifier of the command line."""
    from paceline.simulated import model
    from paceline.verifier import __main__ as service

    # Simulated targets are made of it.
    setattr(model, "SimulatedTarget", ComputedTarget)  # noqa: B010 - mypy knows the module by its own names alone
    service.main()


if __name__ == "__main__":
    main()
