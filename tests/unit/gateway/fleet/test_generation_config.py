"""A model's own sampling defaults are read from its folder, from another one or not at all; broken files are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.gateway.fleet.generation_config import FILE, ModelDefaults, model_defaults

QWEN3 = {
    "bos_token_id": 151643, "do_sample": True, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0",
}  # fmt: skip


def write(folder: Path, **content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / FILE).write_text(json.dumps(content))
    return folder


def test_what_a_model_says_of_sampling_is_taken_and_the_rest_left(tmp_path: Path) -> None:
    found = model_defaults("auto", write(tmp_path, **QWEN3))
    assert found == ModelDefaults(sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.95})


def test_the_longest_answer_is_no_field_of_sampling(tmp_path: Path) -> None:
    found = model_defaults("auto", write(tmp_path, max_new_tokens=2048, min_p=0.1, repetition_penalty=1.05))
    assert found == ModelDefaults(sampling={"min_p": 0.1, "repetition_penalty": 1.05}, max_new_tokens=2048)


def test_null_says_nothing_and_minus_one_is_off(tmp_path: Path) -> None:
    assert model_defaults("auto", write(tmp_path, temperature=None, top_k=-1)) == ModelDefaults(sampling={"top_k": 0})


def test_another_folder_may_be_named_or_none(tmp_path: Path) -> None:
    own, other = write(tmp_path / "own", top_k=20), write(tmp_path / "other", top_k=5)
    assert model_defaults(str(other), own).sampling == {"top_k": 5}
    assert model_defaults("vllm", own) == ModelDefaults()


def test_a_model_needs_no_such_file_but_a_folder_that_is_named_does(tmp_path: Path) -> None:
    assert model_defaults("auto", tmp_path) == ModelDefaults()
    with pytest.raises(ConfigError, match=FILE):
        model_defaults(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("temperature", "hot", "must be a number, got 'hot'"),
        ("temperature", -1, "must be a number from 0 to 100, got -1"),
        ("top_p", 0, "must be above 0, got 0"),
        ("top_p", float("nan"), "must be a number from 0 to 1, got nan"),
        ("top_k", 2.5, "must be a whole number, got 2.5"),
        ("top_k", -2, "must be at least 0, got -2"),
        ("min_p", True, "must be a number, got True"),
        ("repetition_penalty", [1], r"must be a number, got \[1\]"),
        ("max_new_tokens", 0, "must be at least 1, got 0"),
    ],
)
def test_a_broken_value_is_named_with_file_and_limit(tmp_path: Path, field: str, value: Any, problem: str) -> None:
    write(tmp_path, **{field: value})
    with pytest.raises(ConfigError, match=f"{tmp_path / FILE}: {field}: {problem}"):
        model_defaults("auto", tmp_path)


def test_a_file_that_is_no_json_object_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("[")
    with pytest.raises(ConfigError, match=FILE):
        model_defaults("auto", tmp_path)
