"""llama.cpp: the engine of its server in this process, with a slot for each stream."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import xllamacpp  # type: ignore[import-not-found]

if TYPE_CHECKING:
    from loadtest.peers.inside import protocol
else:
    import protocol


class LlamaCpp:
    """A server without its HTTP port; every stream is asked from a thread of its own."""

    def __init__(self, job: protocol.Job) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = job.target
        params.n_parallel = job.most_streams
        params.n_ctx = job.most_streams * job.longest
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(job.cores)
        # Found prompts would make later passes cheaper than the first.
        params.cache_prompt = False
        params.warmup = True
        self._job = job
        self._server = xllamacpp.Server(params)

    def about(self) -> protocol.About:
        """Version and precision."""
        return protocol.About(
            version=f"xllamacpp {xllamacpp.__version__}", precision=re.split("[-.]", Path(self._job.target).stem)[-1]
        )

    def run(self, prompts: protocol.TokenIds, max_new_tokens: int) -> protocol.Wave:
        """All prompts at once, one thread each."""
        clock = protocol.WaveClock(len(prompts), max_new_tokens)
        token_ids: list[list[int]] = [[] for _ in prompts]
        lock = threading.Lock()

        def taker(ids: list[int]) -> Callable[[Any], bool]:
            def take(answer: Any) -> bool:
                """Takes the next token of an answer; True would end it."""
                with lock:
                    # Tokens come as text alone. A hash tells whether two texts are the same.
                    ids.extend(crc32(each["text"].encode()) for each in answer["choices"] if not each["finish_reason"])
                    clock.note([len(each) for each in token_ids])
                return False

            return take

        with ThreadPoolExecutor(len(prompts)) as threads:
            asks = [
                threads.submit(self._server.handle_completions, self._ask(prompt, max_new_tokens), taker(ids))
                for prompt, ids in zip(prompts, token_ids, strict=True)
            ]
            for ask in asks:
                ask.result()
        return clock.wave([ids[:max_new_tokens] for ids in token_ids])

    def _ask(self, prompt: Sequence[int], max_new_tokens: int) -> dict[str, Any]:
        job = self._job
        return {
            "prompt": [*prompt],
            "n_predict": max_new_tokens,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
            "temperature": job.temperature,
            "top_p": job.top_p,
            "top_k": job.top_k,
            # Off, as everywhere else: these are its own defaults.
            "min_p": 0.0,
            "repeat_penalty": 1.0,
        }


if __name__ == "__main__":
    protocol.serve(LlamaCpp)
