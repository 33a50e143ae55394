import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from paceline.training import widen as module
from paceline.training.widen import widen


def logits_of(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.arange(5, 69).reshape(2, 32)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert isinstance(logits, torch.Tensor)
    return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_widening_keeps_the_logits_bit_equal(target_folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    widen(target_folder, tmp_path / "wide", 128)
    before, after = logits_of(target_folder, dtype), logits_of(tmp_path / "wide", dtype)
    assert torch.equal(before, after)


def test_the_new_neurons_do_work_that_the_down_projection_drops(target_folder: Path, tmp_path: Path) -> None:
    widen(target_folder, tmp_path / "wide", 128)
    with safe_open(str(tmp_path / "wide" / "model.safetensors"), framework="pt") as weights:
        up = weights.get_tensor("model.layers.0.mlp.up_proj.weight")
        down = weights.get_tensor("model.layers.0.mlp.down_proj.weight")
    assert up.shape == (128, 32)
    assert down.shape == (32, 128)
    assert bool((up[48:] != 0).any(dim=1).all())
    assert not down[:, 48:].any()


def test_the_config_says_what_the_checkpoint_is(target_folder: Path, tmp_path: Path) -> None:
    count = widen(target_folder, tmp_path / "wide", 128)
    config = json.loads((tmp_path / "wide" / "config.json").read_text(encoding="utf-8"))
    assert config["intermediate_size"] == 128
    assert config["paceline_widened_from"] == {"name": "target", "intermediate_size": 48}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert count == sum(parameter.numel() for parameter in model.parameters())
    assert (tmp_path / "wide" / "tokenizer.json").is_file()


def test_large_checkpoints_are_written_in_shards_that_load(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHARD_BYTES", 40_000)
    widen(target_folder, tmp_path / "wide", 128)
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 1
    assert torch.equal(logits_of(target_folder, torch.float32), logits_of(tmp_path / "wide", torch.float32))


def test_a_size_that_is_not_larger_is_refused(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be above 48"):
        widen(target_folder, tmp_path / "wide", 48)


def test_a_folder_with_content_is_not_overwritten(target_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        widen(target_folder, target_folder, 128)


def test_a_folder_without_weights_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"intermediate_size": 8}', encoding="utf-8")
    with pytest.raises(FileNotFoundError):
        widen(tmp_path / "empty", tmp_path / "wide", 128)
    assert not (tmp_path / "wide").exists()
