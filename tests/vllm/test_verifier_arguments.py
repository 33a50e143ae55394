"""Arguments for vLLM go through its own parser; those that we decide ourselves are refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.verifier.config import VLLM, VerifierConfig

pytest.importorskip("vllm")
from paceline.verifier.vllm.launch import current_platform, engine_arguments, vllm_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

# A folder that is there: vLLM looks for any other name at the Hub.
MODEL = Path(__file__).parent
CONFIG = VerifierConfig(model=MODEL, engine=VLLM, max_num_seqs=5, redis_url="redis://store:6379")


def test_arguments_reach_vllm_beside_those_that_follow_from_our_settings() -> None:
    given = engine_arguments(replace(CONFIG, vllm_arg=("--quantization=fp8", "--tensor-parallel-size", "2")))
    assert (given.quantization, given.tensor_parallel_size) == ("fp8", 2)
    assert (given.model, given.max_num_seqs, given.skip_tokenizer_init) == (str(MODEL), 5, True)
    assert given.speculative_config["method"] == "custom_class"


def test_what_users_say_of_kv_stays() -> None:
    given = engine_arguments(replace(CONFIG, vllm_arg=("--kv-cache-memory-bytes=12345678",)))
    assert given.kv_cache_memory_bytes == 12345678


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--nonsense=1", "--vllm-arg: unrecognized arguments: --nonsense=1"),
        ("--tensor-parallel-size=two", "--vllm-arg: argument --tensor-parallel-size"),
        ("--max-num-seqs=3", "--vllm-arg=--max-num-seqs: is decided by --max-num-seqs"),
        ("--max-model-len=64", "--vllm-arg=--max-model-len: is decided by --max-model-len"),
        ('--speculative-config={"method": "ngram"}', "--vllm-arg=--speculative-config: is decided by"),
        ('--additional-config={"a": 1}', "--vllm-arg=--additional-config: is decided by"),
        ("--skip-tokenizer-init", "--vllm-arg=--skip-tokenizer-init: is decided by"),
    ],
)
def test_an_argument_that_is_wrong_or_ours_is_named(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_arguments(replace(CONFIG, vllm_arg=(argument,)))


def test_the_type_of_weights_is_said_in_one_place() -> None:
    assert engine_arguments(replace(CONFIG, vllm_arg=("--dtype=float16",))).dtype == "float16"
    with pytest.raises(ConfigError, match="--vllm-arg=--dtype: is decided by --dtype bfloat16"):
        engine_arguments(replace(CONFIG, dtype="bfloat16", vllm_arg=("--dtype=float16",)))


def test_a_device_that_this_build_does_not_know_is_refused(tmp_path: Path) -> None:
    config = replace(CONFIG, model=tmp_path, device="cuda" if current_platform.is_cpu() else "cpu")
    with pytest.raises(ConfigError, match=r"--device .* this vLLM runs on"), vllm_engine(config):
        pass
