"""Reading weights, and saying clearly why a folder cannot be read."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from paceline.core.errors import ConfigError
from paceline.engine.checkpoint import Checkpoint

FIRST, SECOND = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)


def test_a_single_file_is_read_by_name(tmp_path):
    save_file({"a": FIRST, "b": SECOND}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == {"a", "b"}
    assert torch.equal(checkpoint.tensor("a", (2, 3)), FIRST)
    assert checkpoint.tensor("b").dtype == torch.bfloat16


def test_shards_are_found_through_the_index(tmp_path):
    save_file({"a": FIRST}, tmp_path / "model-1.safetensors")
    save_file({"b": SECOND}, tmp_path / "model-2.safetensors")
    save_file({"c": SECOND}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.names == {"a", "b"}
    assert torch.equal(checkpoint.tensor("b"), SECOND)


def test_a_missing_shard_is_named(tmp_path):
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"names shards that are not there: model-1\.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "weights.pkl"])
def test_pickled_weights_are_refused_without_being_opened(tmp_path, name):
    (tmp_path / name).write_bytes(b"not even a pickle")
    with pytest.raises(ConfigError, match=rf"holds pickled weights only \({re.escape(name)}\).*convert models with"):
        Checkpoint(tmp_path)


def test_an_empty_folder_and_a_damaged_file_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors weights"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        Checkpoint(tmp_path)


def test_missing_tensors_and_wrong_shapes_are_named(tmp_path):
    save_file({"a": FIRST}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lacks the tensor 'lm_head\.weight'"):
        Checkpoint(tmp_path).tensor("lm_head.weight")
    with pytest.raises(ConfigError, match=r"'a' is \[2, 3\], config.json asks for \[3, 2\]"):
        Checkpoint(tmp_path).tensor("a", (3, 2))
