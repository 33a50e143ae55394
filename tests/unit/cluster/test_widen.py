import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.support.checkpoints import save_pair
from transformers import AutoModelForCausalLM

from paceline.cluster import widen as module
from paceline.cluster.widen import widen


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Of 96 neurons, 64 wide."""
    return save_pair(tmp_path)[0]


def logits_of(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ids = torch.arange(5, 69).reshape(2, 32)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def test_widening_keeps_the_logits_bit_equal_and_says_what_it_is(source: Path, tmp_path: Path) -> None:
    count = widen(source, tmp_path / "wide", 128)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits_of(source, dtype), logits_of(tmp_path / "wide", dtype))
    config = json.loads((tmp_path / "wide" / "config.json").read_text(encoding="utf-8"))
    assert config["intermediate_size"] == 128
    assert config["paceline_widened_from"] == {"name": "target", "intermediate_size": 96}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert count == sum(parameter.numel() for parameter in model.parameters())
    assert (tmp_path / "wide" / "tokenizer.json").is_file()


def test_the_new_neurons_do_work_that_the_down_projection_drops(source: Path, tmp_path: Path) -> None:
    widen(source, tmp_path / "wide", 128)
    with safe_open(str(tmp_path / "wide" / "model.safetensors"), framework="pt") as weights:
        up = weights.get_tensor("model.layers.0.mlp.up_proj.weight")
        down = weights.get_tensor("model.layers.0.mlp.down_proj.weight")
    assert up.shape == (128, 64)
    assert down.shape == (64, 128)
    assert bool((up[96:] != 0).any(dim=1).all())
    assert not down[:, 96:].any()


def test_large_checkpoints_are_written_in_shards_that_load(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SHARD_BYTES", 100_000)
    widen(source, tmp_path / "wide", 128)
    assert len(list((tmp_path / "wide").glob("*.safetensors"))) > 1
    assert torch.equal(logits_of(source, torch.float32), logits_of(tmp_path / "wide", torch.float32))


def test_what_cannot_be_widened_is_refused_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be above 96"):
        widen(source, tmp_path / "wide", 96)
    with pytest.raises(FileExistsError):
        widen(source, source, 128)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text('{"intermediate_size": 8}', encoding="utf-8")
    with pytest.raises(FileNotFoundError):
        widen(tmp_path / "empty", tmp_path / "wide", 128)
    assert not (tmp_path / "wide").exists()
