"""OpenVINO GenAI: its continuous batching pipeline on the CPU, driven step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from loadtest.peers.inside import protocol
else:
    import protocol

CACHE_GIB = 1


class OpenVino:
    """Both models converted to IR with bf16 weights."""

    def __init__(self, job: protocol.Job) -> None:
        properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": len(job.cores)}
        draft = {}
        if job.draft_length is not None:
            draft["draft_model"] = genai.draft_model(job.draft, "CPU", **properties)
        self._job = job
        self._pipeline = genai.ContinuousBatchingPipeline(
            job.target, genai.Tokenizer(job.target), _scheduler(job), "CPU", **properties, **draft
        )

    def about(self) -> protocol.About:
        """Version and precision."""
        version = genai.__version__.split("-")[0]
        return protocol.About(version=version, precision="bf16, KV cache u8 (its default)")

    def run(self, prompts: protocol.TokenIds, max_new_tokens: int) -> protocol.Wave:
        """All prompts as requests of one pipeline."""
        config = self._config(max_new_tokens)
        clock = protocol.WaveClock(len(prompts), max_new_tokens)
        handles = [
            self._pipeline.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for number, prompt in enumerate(prompts)
        ]
        token_ids: list[list[int]] = [[] for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, ids in zip(handles, token_ids, strict=True):
                if handle.can_read():
                    for output in handle.read().values():
                        ids += output.generated_ids
            clock.note([len(ids) for ids in token_ids])
        return clock.wave([ids[:max_new_tokens] for ids in token_ids])

    def _config(self, max_new_tokens: int) -> Any:
        config = genai.GenerationConfig()
        config.do_sample = self._job.temperature > 0.0
        if config.do_sample:
            config.temperature, config.top_p = self._job.temperature, self._job.top_p
            if self._job.top_k:
                config.top_k = self._job.top_k
        config.ignore_eos = True
        config.max_new_tokens = max_new_tokens
        if self._job.draft_length is not None:
            config.num_assistant_tokens = self._job.draft_length
        return config


def _scheduler(job: protocol.Job) -> Any:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = CACHE_GIB
    scheduler.max_num_seqs = job.most_streams
    # All prompts of a wave fit one step; found prompts would make later passes cheaper than the first.
    scheduler.max_num_batched_tokens = job.most_streams * job.longest
    scheduler.enable_prefix_caching = False
    return scheduler


if __name__ == "__main__":
    protocol.serve(OpenVino)
