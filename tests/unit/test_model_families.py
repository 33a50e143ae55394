"""What is said of models by their config.json, on the configurations of public checkpoints kept in `tests/data`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.checkpoints.families import GENERIC, LEAN, family_of, refusal, vllm_refusal
from paceline.cli import main
from paceline.cluster.models import answer, sizes_of
from paceline.core.errors import ConfigError
from paceline.engine.config import DecoderConfig

CONFIGS = json.loads((Path(__file__).parents[1] / "data" / "model_configs.json").read_text(encoding="utf-8"))
QUANTISED = r"quantised checkpoints \({}\) are not served by our engine: name the one with bf16 weights, or .* vllm"
# Of each: our decoder or why there is none; parameters (1e9) and bytes (GB) of the decoder of text as published; KV of
# a token in KiB, and of a session of 8,000 tokens in GB. None: config.json does not tell.
SAID = {
    "meta-llama/Llama-3.1-8B-Instruct": (LEAN, 8.03, 16.1, 128, 1.049),
    "meta-llama/Llama-3.2-1B": (LEAN, 1.24, 2.47, 32, 0.262),
    "mistralai/Mistral-7B-v0.1": (LEAN, 7.24, 14.5, 128, 0.537),
    "mistralai/Mistral-7B-Instruct-v0.3": (LEAN, 7.25, 14.5, 128, 1.049),
    "Qwen/Qwen2.5-7B-Instruct": (LEAN, 7.62, 15.2, 56, 0.459),
    "Qwen/Qwen3-8B": (LEAN, 8.19, 16.4, 144, 1.180),
    "Qwen/Qwen3-0.6B": (LEAN, 0.596, 1.19, 112, 0.918),
    "google/gemma-2-9b-it": ("attn_logit_softcapping", 9.24, 18.5, 336, 2.081),
    "google/gemma-3-1b-it": (GENERIC, 1.0, 2.0, 26, 0.044),
    "google/gemma-3-12b-it": ("reads more than text", 11.77, 23.5, 384, 0.860),
    "microsoft/Phi-3-mini-4k-instruct": (GENERIC, 3.82, 7.64, 384, 0.805),
    "microsoft/Phi-4-mini-instruct": ("'longrope' is not served", 3.84, 7.67, 128, 1.049),
    "openai-community/gpt2": (GENERIC, 0.124, 0.249, 36, 0.295),
    "allenai/OLMo-2-1124-7B": (GENERIC, 7.3, 29.2, 512, 4.194),
    "stabilityai/stablelm-2-1_6b": (GENERIC, 1.64, 3.29, 192, 1.573),
    "EleutherAI/pythia-6.9b": (GENERIC, 6.86, 13.7, 512, 4.194),
    "bigcode/starcoder2-7b": (GENERIC, 7.17, 14.3, 64, 0.268),
    "tiiuae/falcon-7b": ("attention interface", 6.92, 13.8, 8, 0.066),
    "facebook/opt-1.3b": (GENERIC, 1.32, 2.63, 192, 1.573),
    "ibm-granite/granite-3.3-8b-instruct": (GENERIC, 8.17, 16.3, 160, 1.311),
    "HuggingFaceTB/SmolLM3-3B": (GENERIC, 3.08, 6.15, 72, 0.590),
    "zai-org/GLM-4-9B-0414": (GENERIC, 9.4, 18.8, 40, 0.328),
    "CohereForAI/c4ai-command-r7b-12-2024": (GENERIC, 8.03, 16.1, 128, 0.665),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (GENERIC, 46.7, 93.4, 128, 1.049),
    "Qwen/Qwen3-30B-A3B": (GENERIC, 30.5, 61.1, 96, 0.786),
    "deepseek-ai/DeepSeek-V2-Lite": (r"latent \(MLA\)", 15.7, 31.4, 30.375, 0.249),
    "deepseek-ai/DeepSeek-V3": (r"latent \(MLA\)", 671, 673, 68.625, 0.562),
    "openai/gpt-oss-20b": ("attention has sinks", 20.9, 13.7, 48, 0.200),
    "state-spaces/mamba-2.8b-hf": ("a state that is not paged KV", None, None, 0, 0),
    "ai21labs/Jamba-v0.1": ("a state that is not paged KV", None, None, 16, 0.131),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("a state that is not paged KV", None, None, 24, 0.197),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("reads more than text", 7.62, 15.2, 56, 0.459),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("reads more than text", 108, 216, 192, 1.573),
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": (QUANTISED.format("awq"), 8.03, 5.73, 128, 1.049),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": (QUANTISED.format("gptq"), 7.62, 5.57, 56, 0.459),
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8": (QUANTISED.format("compressed-tensors"), 8.03, 9.08, 128, 1.049),
    "RedHatAI/Qwen3-8B-quantized.w4a16": (QUANTISED.format("compressed-tensors"), 8.19, 6.1, 144, 1.180),
    "Qwen/Qwen3-8B-FP8": (QUANTISED.format("fp8"), 8.19, 9.44, 144, 1.180),
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": (QUANTISED.format("bitsandbytes"), 8.03, 5.7, 128, 1.049),
    "baichuan-inc/Baichuan2-7B-Chat": ("brings Python code of its own .*--trust-remote-code", 7.51, 15.0, 512, 4.194),
    "google/flan-t5-base": ("must name one causal language model", None, None, None, None),
    "google-bert/bert-base-uncased": ("must name one causal language model", None, None, None, None),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_said_of_a_public_checkpoint_is_what_is_known_of_it(name: str) -> None:
    config, (ours, billions, gigabytes, kib, session) = CONFIGS[name], SAID[name]
    family, sizes, why = family_of(config), sizes_of(config), refusal(config)
    lines = "\n".join(answer(name, config))
    if ours in (LEAN, GENERIC):
        assert (why, family and family.decoder) == ("", ours)
        assert "our engine  serves it" in lines
    else:
        with pytest.raises(ConfigError, match=ours):
            raise ConfigError(why)
        assert f"our engine  no: {why}" in lines
    if kib is None:
        assert vllm_refusal(config)
        return
    assert not vllm_refusal(config)
    assert sizes is not None
    assert sizes.kv_bytes(1) / 1024 == kib
    assert sizes.kv_bytes(8000) / 1e9 == pytest.approx(session, abs=6e-4)
    if billions is None:
        assert sizes.weight_bytes is None
    else:
        assert sizes.num_parameters is not None
        assert sizes.weight_bytes is not None
        assert sizes.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)
        assert sizes.weight_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_reads_the_same_of_it_or_refuses_it_in_the_same_words(name: str, tmp_path: Path) -> None:
    config, sizes = CONFIGS[name], sizes_of(CONFIGS[name])
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    why = refusal(config)
    if why:
        with pytest.raises(ConfigError) as told:
            DecoderConfig.from_folder(tmp_path)
        assert str(told.value) == f"{why} ({tmp_path})"
        return
    found = DecoderConfig.from_folder(tmp_path)
    assert sizes is not None
    assert found.num_layers == sizes.num_layers
    assert 4 * found.num_kv_heads * found.head_dim == sizes.kv_layer_bytes
    assert found.context_len == (sizes.window if sizes.window_layers else sizes.context_len)


def test_a_family_that_nobody_knows_is_tried_by_both_engines() -> None:
    config = {"architectures": ["NeverHeardOfForCausalLM"], "model_type": "llama"}
    assert refusal(config) == ""
    lines = "\n".join(answer("x", config))
    assert "if a trial at start gives transformers' own logits" in lines
    assert "is not known to serve it; try --engine vllm" in lines


def test_models_check_reads_a_folder_and_counts_a_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["Qwen/Qwen3-8B"]), encoding="utf-8")
    main(["models", "check", str(tmp_path), "--context", "20000"])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "our engine  serves it, by the decoder made for it",
        "vLLM        serves it with --engine vllm",
        "weights     16.4 GB (as stored)",
        "KV          144 KiB a token, 0.147 GB for 1,000, 2.95 GB for 20,000, 6.04 GB for 40,960 tokens (16 bits)",
        "limits      40,960 tokens",
    ]
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["google/flan-t5-base"]), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["models", "check", str(tmp_path)])
    assert ended.value.code == 1
