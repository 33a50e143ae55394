"""lm-eval's loglikelihood over /v1/completions: a task of its own, and sums that the token log probabilities give."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from openai import OpenAI

QUESTIONS = [
    {"context": "Once upon a time there was a", "choices": [" little girl", " qx zz vv"], "right": 0},
    {"context": "She went to the", "choices": [" ## %% @@", " park"], "right": 1},
]
TASK: dict[str, Any] = {
    "task": "paceline_tiny",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{context}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "right",
    "target_delimiter": "",
    "metric_list": [{"metric": "acc"}],
}


@pytest.fixture(params=[1, 4])
def model(served, request) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        base_url=f"{served.v1}/completions",
        model=served.model,
        tokenizer=str(served.folder),
        max_length=512,
        batch_size=request.param,
        max_retries=1,
    )


def test_a_small_task_is_scored(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    data = tmp_path / "test.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    task = {**TASK, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    manager = TaskManager(include_defaults=False)
    results = simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0)
    assert results["results"]["paceline_tiny"]["acc,none"] == 1.0


def test_a_continuation_is_as_likely_as_its_tokens_are(model, served) -> None:
    context, continuation = "Once upon a time there was a", " little girl"
    [(total, greedy)] = model.loglikelihood(
        [Instance("loglikelihood", {}, (context, continuation), 0)], disable_tqdm=True
    )
    # Its tokens begin with none of the tokenizer's own.
    tokens, begins = model.tok_encode(context + continuation), len(model.tok_encode(context))
    client = OpenAI(base_url=served.v1, api_key="none")
    asked = {"model": served.model, "prompt": tokens, "echo": True, "max_tokens": 0, "logprobs": 1}
    told = client.completions.create(**asked).choices[0].logprobs
    assert total == pytest.approx(sum(told.token_logprobs[begins:]), abs=1e-4)
    best = [max(each.values()) for each in told.top_logprobs[begins:]]
    assert greedy == (best == told.token_logprobs[begins:])
