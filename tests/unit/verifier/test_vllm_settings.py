"""What a verifier tells vLLM, and what it calls the result."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.messages import ModelIdentity
from paceline.verifier.config import DEFAULT_VLLM_DRAFT_TOKENS, VLLM, VerifierConfig
from paceline.verifier.vllm.identity import vllm_identity
from paceline.verifier.vllm.settings import (
    CPU_KV_BYTES,
    PROPOSER,
    check_settings,
    decided,
    process_environment,
)
from paceline.vllm.settings import settings_of

CONFIG = VerifierConfig(model=Path("/models/m"), engine=VLLM, redis_url="redis://store:6379")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_blocks": 64}, "--num-kv-blocks is for our own engine.*--kv-cache-memory-bytes"),
        ({"spare_cpus": "1"}, "--spare-cpus is for our own engine"),
        ({"max_num_batched_tokens": 64}, "--max-num-batched-tokens is for our own engine"),
    ],
)
def test_settings_that_mean_nothing_to_vllm_are_refused_with_what_stands_for_them(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(replace(CONFIG, **changes))


def test_arguments_for_vllm_need_vllm() -> None:
    with pytest.raises(ConfigError, match="--vllm-arg needs --engine vllm"):
        VerifierConfig(model=Path("m"), vllm_arg=("--enforce-eager",))


def test_vllm_drafts_with_the_tier_of_the_verifiers_registry() -> None:
    check_settings(CONFIG)
    config = replace(CONFIG, tls_dir=Path("/tls"), learned_dir="none", max_model_len=64, dtype="bfloat16")
    told = decided(config, on_cpu=False)
    assert told["speculative_config"] == {
        "method": "custom_class",
        "model": PROPOSER,
        "num_speculative_tokens": DEFAULT_VLLM_DRAFT_TOKENS,
    }
    tier = settings_of(told["additional_config"])
    assert (tier.registry, tier.tls_dir, tier.learned_dir) == ("redis://store:6379", "/tls", "none")
    assert (told["model"], told["max_model_len"], told["dtype"]) == ("/models/m", 64, "bfloat16")
    assert "kv_cache_memory_bytes" not in told


@pytest.mark.parametrize(
    "changes", [{"speculative_config": '{"num_speculative_tokens": 0}'}, {"redis_url": "memory://"}]
)
def test_vllm_does_not_speculate_where_nothing_is_to_be_drafted(changes: dict[str, Any]) -> None:
    assert "speculative_config" not in decided(replace(CONFIG, **changes), on_cpu=False)


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"method": "medusa"}, "method must be one of draft_model, got 'medusa'"),
        ({"acceptance": "rejection"}, "acceptance is no setting"),
        ({"num_speculative_tokens": 65}, "num_speculative_tokens must be a whole number from 0 to 64"),
    ],
)
def test_ways_to_speculate_that_vllm_does_not_know_are_refused(speculative: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(CONFIG, speculative_config=json.dumps(speculative))


def test_the_cpu_build_keeps_little_for_kv_where_nobody_says_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    assert decided(CONFIG, on_cpu=True)["kv_cache_memory_bytes"] == CPU_KV_BYTES
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert "kv_cache_memory_bytes" not in decided(CONFIG, on_cpu=True)


@pytest.mark.parametrize(
    ("cpus", "num_ranks", "bound"), [("0,2-3", 1, "0,2,3"), ("0-3", 2, "0,1|2,3"), ("5", 2, "5|5")]
)
def test_vllms_threads_keep_to_the_cpus_of_the_verifier(cpus: str, num_ranks: int, bound: str) -> None:
    environment = process_environment(replace(CONFIG, cpus=cpus), {}, num_ranks)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == bound


def test_without_cpus_vllm_has_as_many_threads_and_what_users_say_stays() -> None:
    environment = process_environment(replace(CONFIG, threads=4), {}, 2)
    assert (environment["VLLM_CPU_OMP_THREADS_BIND"], environment["OMP_NUM_THREADS"]) == ("nobind", "2")
    own = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    assert not own.keys() & process_environment(CONFIG, own, 1).keys()


def test_the_model_runner_is_vllms_own_choice() -> None:
    assert "VLLM_USE_V2_MODEL_RUNNER" not in process_environment(CONFIG, {}, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "some-model"
    path.mkdir()
    write(path / "config.json", {"text_config": {"vocab_size": 40}, "eos_token_id": 3})
    write(path / "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}})
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return path


def write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def identity(folder: Path, precision: str = "bfloat16") -> ModelIdentity:
    return vllm_identity(folder, "", context_len=128, versions="0.32.0", precision=precision)


def test_a_checkpoint_of_any_architecture_has_an_identity(folder: Path) -> None:
    known = identity(folder)
    assert (known.name, known.vocab_size, known.context_len, known.eos_token_ids) == ("some-model", 40, 128, (3,))
    assert (known.methods, known.acceptance_rules) == (("draft_model",), ("rejection",))
    assert known.arithmetic == "vllm 0.32.0, bfloat16"
    assert not known.exact
    write(folder / "generation_config.json", {"eos_token_id": [3, 4]})
    assert identity(folder).eos_token_ids == (3, 4)


def test_other_weights_and_another_precision_are_other_models(folder: Path) -> None:
    known = identity(folder).weights_hash
    assert identity(folder, "bfloat16, quantisation fp8").weights_hash != known
    (folder / "model.safetensors").write_bytes(bytes(256) * 64)
    assert identity(folder).weights_hash != known


@pytest.mark.parametrize(
    ("missing", "message"),
    [("model.safetensors", "has no weights"), ("tokenizer.json", "has no tokenizer.json"), ("config.json", "config")],
)
def test_a_folder_that_lacks_a_file_says_which(folder: Path, missing: str, message: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        identity(folder)


def test_a_checkpoint_without_a_vocabulary_size_is_refused(folder: Path) -> None:
    write(folder / "config.json", {})
    with pytest.raises(ConfigError, match="vocab_size must be a whole number from 1"):
        identity(folder)


IMPORTS = """
import sys
import paceline.verifier.__main__
sys.exit(" ".join(sorted({"torch", "transformers", "vllm"} & set(sys.modules))) or None)
"""


def test_the_verifier_imports_no_engine_before_it_knows_which() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_python_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match="--engine vllm: vLLM cannot be imported"):
        importlib.import_module("paceline.verifier.vllm.launch")
