"""vLLM's CPU build: its engine in this process, compiled, driven step by step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import vllm  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from loadtest.peers.inside import protocol
else:
    import protocol

CONTEXT_STEP = 512
"""A context in such steps leaves room to draft past the end, and lets jobs share compiled code."""


class Vllm:
    """An engine; its draft length is fixed when it is made."""

    def __init__(self, job: protocol.Job) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, job.cores))
        self._engine = vllm.LLM(
            model=job.target,
            dtype="bfloat16",
            max_num_seqs=job.most_streams,
            max_model_len=(job.longest // CONTEXT_STEP + 1) * CONTEXT_STEP,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **_speculation(job),
        ).llm_engine
        self._sampling = {"temperature": job.temperature, "top_p": job.top_p, "top_k": job.top_k}
        self._num_requests = 0

    def about(self) -> protocol.About:
        """Version and precision."""
        return protocol.About(version=vllm.__version__, precision="bf16")

    def run(self, prompts: protocol.TokenIds, max_new_tokens: int) -> protocol.Wave:
        """All prompts as requests of one engine."""
        sampling = vllm.SamplingParams(**self._sampling, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False)
        clock = protocol.WaveClock(len(prompts), max_new_tokens)
        names = []
        for prompt in prompts:
            self._num_requests += 1
            names.append(str(self._num_requests))
            self._engine.add_request(names[-1], {"prompt_token_ids": list(prompt)}, sampling)
        outputs: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                # The engine may have lengthened the name with a suffix of its own.
                outputs[output.request_id.split("-")[0]] = output.outputs[0].token_ids
            clock.note([len(ids) for ids in outputs.values()])
        return clock.wave([list(outputs[name]) for name in names])


def _speculation(job: protocol.Job) -> dict[str, Any]:
    """Settings with which an engine speculates as the job wants it."""
    if job.draft_length is None:
        return {}
    draft = {"method": "draft_model", "model": job.draft, "num_speculative_tokens": job.draft_length}
    return {"speculative_config": draft}


if __name__ == "__main__":
    protocol.serve(Vllm)
