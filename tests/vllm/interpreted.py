"""vLLM's V2 model runner on a CPU, its kernels run by Triton's interpreter: `python -m tests.vllm.interpreted`.

A job in JSON on standard input; texts and what was drafted in JSON, on the last line of standard output. Everything
runs in this process.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

MAX_NUM_SEQS, MAX_MODEL_LEN, MAX_CHAIN = 4, 256, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the process does.

    Attributes:
        model: Checkpoint folder.
        prompts: Token ids.
        drafter: Address; None: plain.
        runner: vLLM's model runner, 0 for V1, 1 for V2.
        sampling: Settings of each request; greedy unless they say otherwise.
    """

    model: str
    prompts: list[list[int]]
    max_tokens: int
    drafter: str | None
    runner: str
    sampling: list[dict[str, Any]]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def main() -> None:
    """Runs a job."""
    job = Job(**json.loads(sys.stdin.read()))
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": job.runner,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    show_triton_a_cpu()
    import tests.vllm.steady  # noqa: F401 - a helper that always drafts
    import vllm

    llm = vllm.LLM(
        model=job.model,
        dtype="float32",
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
        enforce_eager=True,
        disable_log_stats=False,
        **speculation(job),
    )
    greedy = {"temperature": 0.0, "max_tokens": job.max_tokens, "ignore_eos": True}
    # It takes tokens that are names in JSON.
    sampling = [vllm.SamplingParams.from_optional(**greedy | each) for each in job.sampling]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in job.prompts], sampling, use_tqdm=False)
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    answer = {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafted_each": [drafted_for(output.outputs[0]) for output in outputs],
        "runner": name_of(runner),
        "speculator": name_of(getattr(runner, "speculator", None)),
        "accepted": counted.get("vllm:spec_decode_num_accepted_tokens", 0),
        "drafted": counted.get("vllm:spec_decode_num_draft_tokens", 0),
    }
    sys.stdout.write(f"\n{json.dumps(answer)}\n")


def drafted_for(completion: Any) -> int:
    """Guesses that were verified for a request."""
    counts = completion.spec_decode_metrics
    return 0 if counts is None else int(counts.num_draft_tokens)


def name_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__name__}"


def show_triton_a_cpu() -> None:
    """vLLM looks for Triton's backend for CPUs; the interpreter needs none, so any will do."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def speculation(job: Job) -> dict[str, Any]:
    if job.drafter is None:
        return {}
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": "tests.vllm.steady.Proposer",
            "num_speculative_tokens": MAX_CHAIN,
        },
        "per_request_spec_decode_metrics": "summary",
        "additional_config": {"paceline": {"drafters": [job.drafter], "learned_dir": "none"}},
    }


if __name__ == "__main__":
    main()
