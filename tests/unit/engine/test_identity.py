"""Replicas that may take over one another's sessions say the same of themselves, others do not."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError
from paceline.engine.backends.cpu import platform
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.loading import choose_dtype, model_identity, weights_hash
from tests.support.checkpoints import save_pair


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"))[0]


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def test_a_copy_of_a_checkpoint_has_its_fingerprint_and_the_type_asked_for_is_part_of_it(folder, copy):
    assert weights_hash(copy, "float32") == weights_hash(folder, "float32")
    assert weights_hash(copy, "auto") == weights_hash(folder, "float32")
    assert weights_hash(copy, "bfloat16") != weights_hash(folder, "float32")
    assert model_identity(copy, "tiny") == model_identity(folder, "tiny")


def test_auto_serves_bfloat16_as_stored(copy):
    weights = copy / "model.safetensors"
    save_file({name: value.to(torch.bfloat16) for name, value in load_file(weights).items()}, weights)
    assert choose_dtype("auto", Checkpoint(copy)) is torch.bfloat16


def test_weights_that_were_trained_further_have_another_fingerprint(folder, copy):
    path = copy / "model.safetensors"
    weights = load_file(path)
    save_file({name: tensor + 1e-3 for name, tensor in weights.items()}, path, {"format": "pt"})
    assert weights_hash(copy, "float32") != weights_hash(folder, "float32")


def test_another_configuration_with_the_same_weights_has_another_fingerprint(folder, copy):
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05') + "\n")
    assert weights_hash(copy, "float32") != weights_hash(folder, "float32")


def test_a_folder_without_weights_has_no_fingerprint(copy):
    (copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors weights"):
        weights_hash(copy, "float32")
    torch.save({}, copy / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="pickled"):
        weights_hash(copy, "float32")


def test_arithmetic_names_the_device_and_the_versions_that_decide_bits(folder, monkeypatch):
    here = model_identity(folder).arithmetic
    assert here == model_identity(folder).arithmetic
    assert here.startswith("cpu, ")
    assert torch.__version__ in here
    monkeypatch.setattr(platform, "sources_hash", lambda *_: "other kernels")
    assert model_identity(folder).arithmetic != here
