"""What config.json means, in its old and new spellings, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.core.errors import ConfigError
from paceline.engine.config import DecoderConfig, LlamaShape, read_transformers_config
from paceline.engine.layers import RopeTable

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "rope_theta": 5000.0,
}


def write(folder, **changes):
    content = {**LLAMA, **changes}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def shape_of(folder):
    return LlamaShape.from_transformers(read_transformers_config(folder), DecoderConfig.from_folder(folder).head_dim)


def test_sizes_come_from_config_json(tmp_path):
    config = DecoderConfig.from_folder(write(tmp_path))
    assert config == DecoderConfig(
        model_type="llama",
        architecture="LlamaForCausalLM",
        vocab_size=97,
        context_len=256,
        longest_context_len=256,
        eos_token_ids=(1,),
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
    )
    assert DecoderConfig.from_folder(write(tmp_path, head_dim=20)).head_dim == 20, "an explicit size wins"
    assert DecoderConfig.from_folder(write(tmp_path, eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(("given", "expected"), [(5, (5,)), ([5, 7], (5, 7)), (None, (1,))])
def test_end_tokens_of_generation_config_go_before_those_of_config(tmp_path, given, expected):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    assert DecoderConfig.from_folder(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("given", ["</s>", [5, None], -1, 2.0, True])
def test_end_tokens_that_are_no_ids_are_named_with_their_file(tmp_path, given):
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: each of eos_token_id must be a whole number"):
        DecoderConfig.from_folder(tmp_path)


def test_old_and_new_spelling_of_rope_parameters_mean_the_same(tmp_path):
    old = shape_of(write(tmp_path, rope_theta=7e3, rope_scaling={"type": "linear", "factor": 4.0}))
    new = shape_of(
        write(
            tmp_path,
            rope_theta=None,
            rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 7e3},
        )
    )
    assert old.rope == new.rope
    assert old.rope.inverse[0] == 0.25


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rope_tables_equal_transformers_at_every_position(tmp_path, rope):
    parameters = {"rope_theta": 5000.0, **rope}
    folder = write(tmp_path, rope_theta=None, rope_parameters=parameters, max_position_embeddings=2048)
    import torch

    positions = torch.tensor([[0, 1, 17, 1023, 1024, 2047]])
    cos, sin = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder))(torch.zeros(1), positions)
    found_cos, found_sin = RopeTable(shape_of(folder).rope).rows(positions[0].numpy())
    np.testing.assert_allclose(found_cos, cos[0, :, :6], atol=1e-6)
    np.testing.assert_allclose(found_sin, sin[0, :, :6], atol=1e-6)


def test_a_position_has_the_same_rotation_however_the_table_grew(tmp_path):
    rope = shape_of(write(tmp_path)).rope
    grown, at_once = RopeTable(rope), RopeTable(rope)
    for position in range(0, 5000, 700):
        grown.rows(np.array([position]))
    positions = np.arange(5000)
    for one, other in zip(grown.rows(positions), at_once.rows(positions), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 128}},
            "rope_scaling: 'dynamic' is not served by our engine",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: only silu is served for llama, got 'gelu'"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(write(tmp_path, **changes))


def test_a_sliding_window_shortens_the_context_to_where_it_changes_nothing(tmp_path):
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert DecoderConfig.from_folder(write(tmp_path, **mistral, sliding_window=64)).context_len == 64
    assert DecoderConfig.from_folder(write(tmp_path, **mistral, sliding_window=None)).context_len == 256
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 64}
    assert DecoderConfig.from_folder(write(tmp_path, **qwen, use_sliding_window=False)).context_len == 256
    windowed = write(tmp_path, **qwen, use_sliding_window=True, max_window_layers=1)
    assert DecoderConfig.from_folder(windowed).context_len == 64


def test_a_folder_without_config_and_a_broken_one_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        DecoderConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        DecoderConfig.from_folder(tmp_path)


def test_reading_a_config_imports_no_compiler_of_torch(tmp_path):
    """120 MiB of each verifier and drafter."""
    code = (
        "import sys; from pathlib import Path; from paceline.engine.config import read_transformers_config as read; "
        f"print(read(Path({str(write(tmp_path))!r})).hidden_act, 'torch._dynamo' in sys.modules); "
        "import transformers.activations as known; print(sorted(known.ACT2FN)[:1]); "
        "import transformers.integrations.hub_kernels as real; print(real.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    read, activations, real = done.stdout.splitlines()
    assert read == "silu False"
    assert activations != "[]"
    assert real != "None", "others get the real module"
