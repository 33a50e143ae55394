"""What is said of models by their config.json, on the configurations of public checkpoints kept in `tests/data`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.checkpoints.families import GENERIC, LEAN, family_of, refusal, vllm_refusal
from paceline.cli import main
from paceline.cluster.models import answer
from paceline.core.errors import ConfigError
from paceline.engine.config import DecoderConfig

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "model_configs.json").read_text(encoding="utf-8"))
QUANTISED = r"quantised checkpoints \({}\) are not served by our engine: name the one with bf16 weights, or .* vllm"
# Our decoder of each, or why there is none.
SAID = {
    "meta-llama/Llama-3.1-8B-Instruct": LEAN,
    "meta-llama/Llama-3.2-1B": LEAN,
    "mistralai/Mistral-7B-v0.1": LEAN,
    "mistralai/Mistral-7B-Instruct-v0.3": LEAN,
    "Qwen/Qwen2.5-7B-Instruct": LEAN,
    "Qwen/Qwen3-8B": LEAN,
    "Qwen/Qwen3-0.6B": LEAN,
    "google/gemma-2-9b-it": "attn_logit_softcapping",
    "google/gemma-3-1b-it": GENERIC,
    "google/gemma-3-12b-it": "reads more than text",
    "microsoft/Phi-3-mini-4k-instruct": GENERIC,
    "microsoft/Phi-4-mini-instruct": "'longrope' is not served",
    "openai-community/gpt2": GENERIC,
    "allenai/OLMo-2-1124-7B": GENERIC,
    "stabilityai/stablelm-2-1_6b": GENERIC,
    "EleutherAI/pythia-6.9b": GENERIC,
    "bigcode/starcoder2-7b": GENERIC,
    "tiiuae/falcon-7b": "attention interface",
    "facebook/opt-1.3b": GENERIC,
    "ibm-granite/granite-3.3-8b-instruct": GENERIC,
    "HuggingFaceTB/SmolLM3-3B": GENERIC,
    "zai-org/GLM-4-9B-0414": GENERIC,
    "CohereForAI/c4ai-command-r7b-12-2024": GENERIC,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": GENERIC,
    "Qwen/Qwen3-30B-A3B": GENERIC,
    "deepseek-ai/DeepSeek-V2-Lite": r"latent \(MLA\)",
    "deepseek-ai/DeepSeek-V3": r"latent \(MLA\)",
    "openai/gpt-oss-20b": "attention has sinks",
    "state-spaces/mamba-2.8b-hf": "a state that is not paged KV",
    "ai21labs/Jamba-v0.1": "a state that is not paged KV",
    "Qwen/Qwen3-Next-80B-A3B-Instruct": "a state that is not paged KV",
    "Qwen/Qwen2.5-VL-7B-Instruct": "reads more than text",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "reads more than text",
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": QUANTISED.format("awq"),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": QUANTISED.format("gptq"),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": QUANTISED.format("compressed-tensors"),
    "RedHatAI/Qwen3-8B-quantized.w4a16": QUANTISED.format("compressed-tensors"),
    "Qwen/Qwen3-8B-FP8": QUANTISED.format("fp8"),
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": QUANTISED.format("bitsandbytes"),
    "baichuan-inc/Baichuan2-7B-Chat": "brings Python code of its own .*--trust-remote-code",
    "google/flan-t5-base": "must name one causal language model",
    "google-bert/bert-base-uncased": "must name one causal language model",
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_said_of_a_public_checkpoint_is_what_is_known_of_it(name: str) -> None:
    config, ours = CONFIGS[name], SAID[name]
    family, why = family_of(config), refusal(config)
    lines = "\n".join(answer(name, config))
    if ours in (LEAN, GENERIC):
        assert (why, family and family.decoder) == ("", ours)
        assert "our engine  serves it" in lines
    else:
        with pytest.raises(ConfigError, match=ours):
            raise ConfigError(why)
        assert f"our engine  no: {why}" in lines
    assert bool(vllm_refusal(config)) == (ours == "must name one causal language model")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_reads_the_same_of_it_or_refuses_it_in_the_same_words(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    why = refusal(config)
    if why:
        with pytest.raises(ConfigError) as told:
            DecoderConfig.from_folder(tmp_path)
        assert str(told.value) == f"{why} ({tmp_path})"
        return
    found = DecoderConfig.from_folder(tmp_path)
    layers = config.get("num_hidden_layers") or config["n_layer"]
    assert found.num_layers == layers


def test_a_family_that_nobody_knows_is_tried_by_both_engines() -> None:
    config = {"architectures": ["NeverHeardOfForCausalLM"], "model_type": "llama"}
    assert refusal(config) == ""
    lines = "\n".join(answer("x", config))
    assert "if a trial at start gives transformers' own logits" in lines
    assert "is not known to serve it; try --engine vllm" in lines


def test_models_check_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen/Qwen3-8B"]), encoding="utf-8")
    main(["models", "check", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "our engine  serves it, by the decoder made for it",
        "vLLM        serves it with --engine vllm",
    ]
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["google/flan-t5-base"]), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["models", "check", str(tmp_path)])
    assert ended.value.code == 1
