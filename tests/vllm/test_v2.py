"""vLLM's V2 model runner with our speculator, put in by the plug-in: its own scheduler, runner and samplers.

V2 needs Triton, and vLLM's CPU build has none for CPUs. So Triton's interpreter runs V2's kernels here, in a process of
its own (`tests.vllm.interpreted`). All the code is vLLM's; no CUDA graph and no second rank is seen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.interpreted import Job

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

RUN_S = 400.0
NUM_TOKENS = 96
V1, V2 = "0", "1"
RUNNERS = {
    V1: "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
    V2: "vllm.v1.worker.cpu.model_runner.CPUModelRunner",
}
MODEL = Path(__file__).parents[2] / "services" / "paceline" / "models" / "demo-target"


# Those of the first requests; the others are greedy.
OFF, BIASED = {"extra_args": {"speculation.enabled": False}}, {"logit_bias": {225: -100.0}}


def run(prompts: list[list[int]], *, runner: str, drafter: str | None = None) -> dict[str, Any]:
    """What the process answers: texts, and what was drafted."""
    settings = [OFF, BIASED, *({} for _ in prompts[2:])]
    job = Job(
        model=str(MODEL), prompts=prompts, max_tokens=NUM_TOKENS, drafter=drafter, runner=runner, sampling=settings
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.interpreted"],
        input=job.to_json(),
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answer["runner"] == RUNNERS[runner]
    return answer


def test_on_v2_texts_with_the_tier_are_those_without_and_guesses_are_accepted(drafter, prompts) -> None:
    plain = run(prompts[:8], runner=V2)
    tiered = run(prompts[:8], runner=V2, drafter=drafter.address)
    assert tiered["texts"] == plain["texts"]
    assert tiered["speculator"] == "paceline.vllm.speculator.Speculator"
    assert [drafted > 0 for drafted in tiered["drafted_each"]] == [False] * 2 + [True] * 6
    assert sum(tiered["drafted_each"]) == tiered["drafted"]
    # Few of a text: a step takes as many guesses as there are, and none counts where there was none.
    assert NUM_TOKENS < tiered["accepted"] <= tiered["drafted"]
    assert tiered["accepted"] > tiered["drafted"] / 2
