"""Which models our engine serves, by the configurations of public checkpoints kept in `tests/data`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.checkpoints.families import refusal
from paceline.core.errors import ConfigError
from paceline.engine.config import DecoderConfig

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "model_configs.json").read_text(encoding="utf-8"))
QUANTISED = r"quantised checkpoints \({}\) are not served by our engine: name the one with bf16 weights, or .* vllm"
# Refused by its config.json.
REFUSED = {
    "google/gemma-3-12b-it": "must name one causal language model",
    "microsoft/Phi-4-mini-instruct": "'longrope' is not served",
    "Qwen/Qwen2.5-VL-7B-Instruct": "must name one causal language model",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "must name one causal language model",
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": QUANTISED.format("awq"),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": QUANTISED.format("gptq"),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": QUANTISED.format("compressed-tensors"),
    "RedHatAI/Qwen3-8B-quantized.w4a16": QUANTISED.format("compressed-tensors"),
    "Qwen/Qwen3-8B-FP8": QUANTISED.format("fp8"),
    "deepseek-ai/DeepSeek-V3": QUANTISED.format("fp8"),
    "openai/gpt-oss-20b": QUANTISED.format("mxfp4"),
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": QUANTISED.format("bitsandbytes"),
    "baichuan-inc/Baichuan2-7B-Chat": "brings Python code of its own .*--trust-remote-code",
    "google/flan-t5-base": "must name one causal language model",
    "google-bert/bert-base-uncased": "must name one causal language model",
}
# A trial at start finds what stands in the way.
TRIED = {
    "google/gemma-2-9b-it",
    "tiiuae/falcon-7b",
    "deepseek-ai/DeepSeek-V2-Lite",
    "state-spaces/mamba-2.8b-hf",
    "ai21labs/Jamba-v0.1",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
}


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - TRIED))
def test_the_engine_reads_a_public_checkpoint_or_says_why_not(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[name]):
            DecoderConfig.from_folder(tmp_path)
        return
    found = DecoderConfig.from_folder(tmp_path)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    assert found.num_layers == layers


def test_of_a_family_that_must_be_tried_nothing_is_refused_before() -> None:
    assert {name: refusal(CONFIGS[name]) for name in TRIED} == dict.fromkeys(TRIED, "")
    assert refusal({"architectures": ["NeverHeardOfForCausalLM"], "model_type": "llama"}) == ""
