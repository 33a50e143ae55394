"""Medusa heads compute what their published layout says, and folders that hold something else are refused by name."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.engine.medusa_heads import MedusaHeads
from tests.support.heads import random_medusa, save_medusa
from tests.unit.engine.tiny_models import SIZES, VOCAB, save_tiny

HIDDEN = SIZES["hidden_size"]


def expected(tensors, states, num_blocks, target_head) -> torch.Tensor:
    """The same by torch alone."""
    logits = []
    for head in range(3):
        rows = states
        for block in range(num_blocks):
            name = f"{head}.{block}.linear"
            inner = rows @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]
            rows = rows + inner * torch.sigmoid(inner)
        logits.append(rows @ tensors.get(f"{head}.{num_blocks}.weight", target_head).T)
    return torch.stack(logits)


def assert_right(decoder, oracle, folder, *, own_heads: bool, num_blocks: int) -> None:
    tensors = random_medusa(hidden=HIDDEN, vocab=VOCAB, num_blocks=num_blocks, own_heads=own_heads)
    save_medusa(folder, tensors, num_heads=3, num_blocks=num_blocks, hidden_size=HIDDEN, vocab_size=VOCAB)
    heads = MedusaHeads.load(folder, decoder)
    states = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    found = expected(tensors, states, num_blocks, oracle.get_output_embeddings().weight.detach())
    torch.testing.assert_close(heads(states, 3), found, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(heads(states, 2), found[:2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_blocks", [1, 2])
@pytest.mark.parametrize("own_heads", [True, False], ids=["own", "target's"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_heads_compute_what_plain_torch_does(tiny, tmp_path, family, own_heads, num_blocks):
    model = tiny(family)
    assert_right(model.load(), model.oracle, tmp_path, own_heads=own_heads, num_blocks=num_blocks)


def test_models_served_by_transformers_modules_lend_their_head_too(tmp_path):
    model = save_tiny(tmp_path / "target", "gpt_neox", {**SIZES, "num_key_value_heads": 4})
    assert_right(model.load(), model.oracle, tmp_path / "heads", own_heads=False, num_blocks=1)


def test_heads_lie_in_a_file_of_the_published_name_as_well(tiny, tmp_path):
    save_medusa(tmp_path, random_medusa(hidden=HIDDEN, vocab=VOCAB), num_heads=3, num_blocks=1)
    (tmp_path / "model.safetensors").rename(tmp_path / "medusa_lm_head.safetensors")
    assert len(MedusaHeads.load(tmp_path, tiny("llama").load())) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "holds no Medusa heads"),
        ({"hidden_size": 64}, "hidden_size in config.json is 64, the target's is 48"),
        ({"vocab_size": 98}, "vocab_size in config.json is 98, the target's is 97"),
        ({"medusa_num_heads": 0}, "medusa_num_heads must be a whole number from 1 to 64, got 0"),
        ({"medusa_num_layers": None}, "medusa_num_layers must be a whole number from 1 to 16, got null"),
        ({"medusa_num_heads": 4}, r"lacks the tensor '3\.0\.linear\.weight'"),
        ({"medusa_num_layers": 2}, r"lacks the tensor '0\.1\.linear\.weight'"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tiny, tmp_path, changes, message):
    save_medusa(tmp_path, random_medusa(hidden=HIDDEN, vocab=VOCAB), num_heads=3, num_blocks=1, **changes)
    with pytest.raises(ConfigError, match=message):
        MedusaHeads.load(tmp_path, tiny("llama").load())


def test_heads_of_another_size_are_refused(tiny, tmp_path):
    save_medusa(tmp_path, random_medusa(hidden=32, vocab=VOCAB), num_heads=3, num_blocks=1)
    with pytest.raises(ConfigError, match=r"'0\.0\.linear\.weight' is \[32, 32\], config\.json asks for \[48, 48\]"):
        MedusaHeads.load(tmp_path, tiny("llama").load())
    with pytest.raises(ConfigError, match=r"nowhere/config\.json cannot be read"):
        MedusaHeads.load(tmp_path / "nowhere", tiny("llama").load())


def test_one_head_of_its_own_asks_for_all(tiny, tmp_path):
    tensors = random_medusa(hidden=HIDDEN, vocab=VOCAB, own_heads=True)
    del tensors["1.1.weight"]
    save_medusa(tmp_path, tensors, num_heads=3, num_blocks=1)
    with pytest.raises(ConfigError, match=r"lacks the tensor '1\.1\.weight'"):
        MedusaHeads.load(tmp_path, tiny("llama").load())


def test_pickled_heads_are_refused_with_a_way_out(tiny, tmp_path):
    save_medusa(tmp_path, random_medusa(hidden=HIDDEN, vocab=VOCAB), num_heads=3, num_blocks=1)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt.*safetensors\.torch\.save_file"):
        MedusaHeads.load(tmp_path, tiny("llama").load())
