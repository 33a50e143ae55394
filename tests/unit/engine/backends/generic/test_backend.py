"""Models that the lean decoder does not know, through transformers' own modules."""

from __future__ import annotations

import pytest
import torch

from paceline.core.errors import ConfigError
from paceline.engine.backends.generic.backend import GenericBackend
from paceline.engine.config import DecoderConfig
from paceline.engine.decoder import Decoder
from tests.unit.engine.plain_reference import PlainPlatform
from tests.unit.engine.tiny_models import (
    NUM_BLOCKS,
    PROMPT,
    SIZES,
    TABLE,
    assert_prompt_and_tree_match,
    chain,
    greedy,
    pack,
    save_tiny,
)

WITHOUT_GQA = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
GPT = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
}
SERVED = {
    "gpt_neox": WITHOUT_GQA,
    "phi": SIZES,
    "gemma": {**SIZES, "head_dim": 16, "pad_token_id": 0},
    "gpt2": {**GPT, "bos_token_id": 0, "eos_token_id": 1},
    "stablelm": {**SIZES, "hidden_size": 64},
    "mixtral": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}
REFUSED = {
    "gemma2": ({**SIZES, "head_dim": 16, "pad_token_id": 0}, r"its attention needs \['softcap'\]: use --engine vllm"),
    "gptj": (
        {**GPT, "rotary_dim": 8, "bos_token_id": 0, "eos_token_id": 1},
        "do not go through transformers",
    ),
    "gpt_oss": ({**SIZES, "head_dim": 16, "num_local_experts": 4, "pad_token_id": 0}, r"needs \['s_aux'\]"),
    "mamba": ({"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2}, "num_attention_heads"),
}


@pytest.mark.parametrize("model_type", sorted(SERVED))
def test_other_families_equal_transformers_in_chunks_and_trees_and_greedily(model_type, tmp_path):
    model = save_tiny(tmp_path, model_type, SERVED[model_type])
    decoder = model.load()
    assert isinstance(decoder.backend, GenericBackend)
    assert_prompt_and_tree_match(decoder, model)
    tokens = greedy(decoder, decoder.new_cache(NUM_BLOCKS), PROMPT[:11], 32, TABLE)
    assert tokens == model.generate(PROMPT[:11], 32)


def test_without_packing_as_on_cuda_the_logits_are_the_same(tmp_path):
    model = save_tiny(tmp_path, "gpt_neox", WITHOUT_GQA)
    config = DecoderConfig.from_folder(tmp_path)
    platform = PlainPlatform()
    assert_prompt_and_tree_match(Decoder(GenericBackend.load(tmp_path, config, torch.float32, platform)), model)


def test_bfloat16_weights_are_packed_and_logits_stay_near(tmp_path):
    model = save_tiny(tmp_path, "gpt_neox", WITHOUT_GQA)
    decoder = model.load("bfloat16")
    logits = decoder.forward(pack(chain(PROMPT), [TABLE]), decoder.new_cache(NUM_BLOCKS))
    exact = model.logits(PROMPT)
    assert logits.dtype == torch.float32
    assert float((logits - exact).square().mean().sqrt() / exact.square().mean().sqrt()) < 0.1
    assert decoder.weight_bytes < model.load("float32").weight_bytes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_what_paged_attention_cannot_do_is_refused_by_name(model_type, tmp_path):
    options, reason = REFUSED[model_type]
    model = save_tiny(tmp_path, model_type, options)
    with pytest.raises(ConfigError, match=reason):
        model.load()
