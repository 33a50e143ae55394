"""Checkpoints as people make them: the greedy text of each, in float32, is that of transformers' `generate`."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from paceline.checkpoints.source import INDEX
from paceline.core.errors import ConfigError
from paceline.engine.loading import load_decoder
from tests.unit.engine.tiny_models import NUM_BLOCKS, PROMPT, SIZES, TABLE, TinyModel, greedy, save_tiny

NUM_TOKENS = 24
HEAD = "lm_head.weight"
WIDE = {**SIZES, "hidden_size": 64, "num_attention_heads": 8}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAST = {"llama GQA 8 tied", "qwen3 other head in the file", "qwen2 YaRN", "mistral other head in the file, sharded"}


@dataclass(frozen=True, kw_only=True)
class Made:
    """How a checkpoint is made.

    Attributes:
        family: transformers' name of it.
        options: Of its config.
        sharded: Its weights lie in several files.
        head: What is put into the file as its head; empty: what transformers puts there.
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    sharded: bool = False
    head: str = ""

    def save(self, folder: Path) -> Path:
        save_tiny(folder, self.family, {**WIDE, **self.options})
        if self.sharded:
            model = AutoModelForCausalLM.from_pretrained(folder)
            (folder / "model.safetensors").unlink()
            model.save_pretrained(folder, max_shard_size="40KB")
            assert len(list(folder.glob("*.safetensors"))) > 2
        if self.head:
            self._put_head(folder)
        return folder

    def _put_head(self, folder: Path) -> None:
        files = sorted(folder.glob("*.safetensors"))
        weights = [load_file(path) for path in files]
        embedding = next(part["model.embed_tokens.weight"] for part in weights if "model.embed_tokens.weight" in part)
        torch.manual_seed(11)
        weights[-1][HEAD] = embedding.clone() if self.head == "same" else torch.randn_like(embedding)
        save_file(weights[-1], files[-1], metadata={"format": "pt"})
        if self.sharded:
            index = json.loads((folder / INDEX).read_text())
            index["weight_map"][HEAD] = files[-1].name
            (folder / INDEX).write_text(json.dumps(index))


LEAN = ("llama", "mistral", "qwen2", "qwen3")
MADE: dict[str, Made] = {
    **{
        f"{family} GQA {8 // kv}{' tied' if tied else ''}{', sharded' if sharded else ''}": Made(
            family=family, options={"num_key_value_heads": kv, "tie_word_embeddings": tied}, sharded=sharded
        )
        for family in LEAN
        for kv, tied, sharded in ((8, False, False), (4, True, True), (2, False, True), (1, True, False))
    },
    **{
        f"{family} {name}": Made(family=family, options={"rope_parameters": rope})
        for family, name, rope in (
            ("llama", "linear", LINEAR),
            ("llama", "YaRN", YARN),
            ("llama", "llama3", LLAMA3),
            ("mistral", "linear", LINEAR),
            ("qwen2", "YaRN", YARN),
            ("qwen3", "YaRN with a factor of its own", {**YARN, "attention_factor": 1.3, "beta_fast": 16.0}),
        )
    },
    "llama biases": Made(family="llama", options={"attention_bias": True, "mlp_bias": True}),
    "qwen3 biases, wide heads": Made(family="qwen3", options={"attention_bias": True, "head_dim": 24}),
    **{
        f"{family} other head in the file{', sharded' if sharded else ''}": Made(
            family=family, options={"tie_word_embeddings": True}, sharded=sharded, head="other"
        )
        for family, sharded in (
            ("llama", False),
            ("llama", True),
            ("mistral", True),
            ("qwen2", False),
            ("qwen3", False),
        )
    },
    "llama the embedding twice in the file": Made(family="llama", options={"tie_word_embeddings": True}, head="same"),
}
EACH = [pytest.param(name, id=name, marks=() if name in FAST else pytest.mark.full) for name in MADE]


@pytest.mark.parametrize("name", EACH)
def test_the_greedy_text_is_transformers_own(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM #51063, #51665: with `tie_word_embeddings` and another head in the file, texts were silently wrong."""
    folder = MADE[name].save(tmp_path / "model")
    oracle = AutoModelForCausalLM.from_pretrained(folder).eval()
    oracle.generation_config.eos_token_id = oracle.config.eos_token_id = None
    expected = TinyModel(folder=folder, oracle=oracle).generate(PROMPT[:11], NUM_TOKENS)
    with caplog.at_level(logging.WARNING, "paceline"):
        decoder = load_decoder(folder, "float32", "cpu")
    assert greedy(decoder, decoder.new_cache(NUM_BLOCKS), PROMPT[:11], NUM_TOKENS, TABLE) == expected
    assert len(set(expected)) > 1
    warned = [record.getMessage() for record in caplog.records if record.name == "paceline.engine.llama_reader"]
    assert len(warned) == (MADE[name].head == "other")


def test_a_head_that_is_promised_and_missing_is_named(tmp_path: Path) -> None:
    folder = Made(family="llama", options={"tie_word_embeddings": True}).save(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ConfigError, match=r"lacks the tensor 'lm_head.weight' that its config.json asks for"):
        load_decoder(folder, "float32", "cpu")
