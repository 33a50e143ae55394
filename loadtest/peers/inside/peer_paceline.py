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

from paceline.cluster.supervisor import THREAD_SETTINGS

# OpenMP reads them when torch is loaded.
os.environ.update(THREAD_SETTINGS)

from paceline import __version__
from paceline.core.draft_policy import DraftPolicy, FixedGamma, Goodput
from paceline.core.draft_scheduler import DraftLimits
from paceline.core.errors import PacelineError
from paceline.core.messages import GenerateRequest
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import NGRAM, SamplingParams, SpeculationParams
from paceline.core.step_time import StepMode
from paceline.core.target_events import Submit, TargetLimits
from paceline.drafting.checkpoint import DraftCheckpoint
from paceline.drafting.colocated import LOCAL, ColocatedEngine
from paceline.drafting.suffix import TextSource
from paceline.engine.decoder import Decoder
from paceline.engine.drafter import DraftEngine
from paceline.engine.identity import model_identity
from paceline.engine.loading import load_decoder
from paceline.engine.target import TargetEngine

MAX_ROWS = 512


class Paceline:
    """The target engine, a thread for each core: plain, or with the draft model beside it taking turns.

    A draft length is the most nodes that a step verifies of a session; how many it does, the policy says.
    """

    def __init__(self, job: protocol.Job) -> None:
        self._job = job
        self._decoder = load_decoder(Path(job.target), "auto", "cpu", len(job.cores))
        self._dtype = str(self._decoder.dtype).removeprefix("torch.")
        self._identity = model_identity(Path(job.target), "target", self._dtype)
        self._draft = DraftCheckpoint(folder=Path(job.draft))
        self._draft_decoder: Decoder | None = None
        self._policy: DraftPolicy = FixedGamma(gamma=0)
        if job.draft_length is not None:
            self._draft_decoder = self._draft.load(len(job.cores))
            self._policy = self._goodput(job.draft_length)

    def _goodput(self, most_nodes: int) -> Goodput:
        policy = Goodput(max_nodes=most_nodes)
        self._decoder.prepare(MAX_ROWS)
        plain, drafting = (self._target_engine().profile(mode) for mode in (StepMode.PLAIN, StepMode.DRAFTING))
        policy.start_from(plain, drafting)
        return policy

    def about(self) -> protocol.About:
        """Version and precision."""
        return protocol.About(version=__version__, precision=f"{self._dtype}, one process")

    def run(self, prompts: protocol.TokenIds, max_new_tokens: int) -> protocol.Wave:
        """All prompts as sessions of one engine, whose prefix cache is empty."""
        engine = self._engine()
        clock = protocol.WaveClock(len(prompts), max_new_tokens)
        token_ids: list[list[int]] = [[] for _ in prompts]
        for serial, prompt in enumerate(prompts):
            request = _request(serial, prompt, max_new_tokens, drafted=self._draft_decoder is not None)
            engine.handle(Submit(request=request, serial=serial, drafter_address=LOCAL))
        while min(map(len, token_ids)) < max_new_tokens:
            for serial, committed in engine.step().committed:
                if isinstance(committed, PacelineError):
                    raise committed
                token_ids[serial] += committed.token_ids
            clock.note([len(ids) for ids in token_ids])
        return clock.wave(token_ids)

    def close(self) -> None:
        """Nothing to stop."""

    def _engine(self) -> TargetEngine | ColocatedEngine:
        target = self._target_engine()
        if self._draft_decoder is None:
            return target
        draft = DraftEngine(
            decoder=self._draft_decoder,
            identity=self._draft.identity(),
            num_blocks=target.pool.num_blocks,
            limits=DraftLimits(),
            clock=time.perf_counter,
        )
        return ColocatedEngine(target, draft, wants_states=False, clock=time.perf_counter)

    def _target_engine(self) -> TargetEngine:
        job = self._job
        blocks = -(-job.longest // BLOCK_SIZE) + 1
        return TargetEngine(
            decoder=self._decoder,
            identity=self._identity,
            num_blocks=job.most_streams * blocks,
            limits=TargetLimits(
                max_num_seqs=job.most_streams,
                max_num_batched_tokens=max(MAX_ROWS, job.most_streams * job.longest),
                max_model_len=self._identity.context_len,
            ),
            policy=self._policy,
            clock=time.perf_counter,
            sources=[TextSource(NGRAM)] if job.draft_length is not None else (),
        )


def _request(serial: int, prompt: Sequence[int], max_new_tokens: int, *, drafted: bool) -> GenerateRequest:
    return GenerateRequest(
        session_id=f"stream {serial}",
        epoch=1,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_new_tokens, temperature=0.0, ignore_eos=True),
        speculation=SpeculationParams(enabled=drafted),
    )


if __name__ == "__main__":
    protocol.serve(Paceline)
