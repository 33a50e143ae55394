import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tests.support.checkpoints import save_pair
from transformers import AutoModelForCausalLM

from paceline.cluster.checkpoints import widen


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
    widen(source, tmp_path / "wide", 128)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits_of(source, dtype), logits_of(tmp_path / "wide", dtype))
    config = json.loads((tmp_path / "wide" / "config.json").read_text(encoding="utf-8"))
    assert config["intermediate_size"] == 128
    assert config["paceline_widened_from"] == {"name": "target", "intermediate_size": 96}
    assert (tmp_path / "wide" / "tokenizer.json").is_file()
    assert [path.name for path in tmp_path.glob("wide*")] == ["wide"], "nothing partial stays"


def test_the_new_neurons_do_work_that_the_down_projection_drops(source: Path, tmp_path: Path) -> None:
    widen(source, tmp_path / "wide", 128)
    with safe_open(str(tmp_path / "wide" / "model.safetensors"), framework="pt") as weights:
        up = weights.get_tensor("model.layers.0.mlp.up_proj.weight")
        down = weights.get_tensor("model.layers.0.mlp.down_proj.weight")
    assert up.shape == (128, 64)
    assert down.shape == (64, 128)
    assert bool((up[96:] != 0).any(dim=1).all())
    assert not down[:, 96:].any()
