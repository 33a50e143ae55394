"""Our own engine as the peers are measured: in one process, without gateway, drafter or anything on the wire."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loadtest.peers.inside import protocol
else:
    import protocol

sys.path.insert(0, str(Path(__file__).parents[3] / "services"))

from paceline.cluster.checkpoints import THREAD_SETTINGS

# OpenMP reads them when torch is loaded.
os.environ.update(THREAD_SETTINGS)

from paceline import __version__
from paceline.core.allocator import FixedGamma
from paceline.core.errors import PacelineError
from paceline.core.messages import GenerateRequest
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.engine.blocks import BLOCK_SIZE
from paceline.engine.decoder import load_decoder
from paceline.engine.identity import model_identity
from paceline.engine.target import TargetEngine
from paceline.engine.target_events import Submit, TargetLimits


class Paceline:
    """The target engine with plain decoding, a thread for each core."""

    def __init__(self, job: protocol.Job) -> None:
        self._job = job
        self._decoder = load_decoder(Path(job.target), "auto", "cpu", len(job.cores))
        self._dtype = str(self._decoder.dtype).removeprefix("torch.")
        self._identity = model_identity(Path(job.target), "target", self._dtype)

    def about(self) -> protocol.About:
        """Version and precision."""
        return protocol.About(version=__version__, precision=f"{self._dtype}, one process")

    def run(self, prompts: protocol.TokenIds, max_new_tokens: int) -> protocol.Wave:
        """All prompts as sessions of one engine, whose prefix cache is empty."""
        engine = self._engine()
        clock = protocol.WaveClock(len(prompts))
        token_ids: list[list[int]] = [[] for _ in prompts]
        for serial, prompt in enumerate(prompts):
            engine.handle(Submit(request=_request(serial, prompt, max_new_tokens), serial=serial))
        while engine.num_sessions:
            for serial, committed in engine.step().committed:
                if isinstance(committed, PacelineError):
                    raise committed
                token_ids[serial] += committed.token_ids
            clock.note([len(ids) for ids in token_ids])
        return clock.wave(token_ids)

    def close(self) -> None:
        """Nothing to stop."""

    def _engine(self) -> TargetEngine:
        job = self._job
        blocks = -(-job.longest // BLOCK_SIZE) + 1
        return TargetEngine(
            decoder=self._decoder,
            identity=self._identity,
            num_blocks=job.most_streams * blocks,
            limits=TargetLimits(
                max_num_seqs=job.most_streams,
                max_num_batched_tokens=job.most_streams * job.longest,
                max_model_len=self._identity.context_len,
            ),
            allocator=FixedGamma(gamma=0),
            clock=time.perf_counter,
        )


def _request(serial: int, prompt: Sequence[int], max_new_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        session_id=f"stream {serial}",
        epoch=1,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_new_tokens, temperature=0.0, ignore_eos=True),
        speculation=SpeculationParams(enabled=False),
        drafter_address="",
    )


if __name__ == "__main__":
    protocol.serve(Paceline)
