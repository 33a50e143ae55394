"""Medusa heads made in the test: random ones, and a target whose next token is known with heads that know it too."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, save_tokenizer

HIDDEN = 64
# Tokens of the counting target follow one another in a circle.
CIRCLE = 250


def save_medusa(
    folder: Path, tensors: dict[str, torch.Tensor], *, num_heads: int, num_blocks: int, **changes: object
) -> Path:
    """Writes heads as published ones are laid out; `changes` go into config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    described = {"model_type": "medusa", "medusa_num_heads": num_heads, "medusa_num_layers": num_blocks, **changes}
    (folder / "config.json").write_text(json.dumps(described))
    save_file(tensors, folder / "model.safetensors")
    return folder


def random_medusa(
    *, hidden: int = HIDDEN, vocab: int = VOCAB_SIZE, num_heads: int = 3, num_blocks: int = 1, own_heads: bool = False
) -> dict[str, torch.Tensor]:
    """Tensors of heads that know nothing."""
    noise = torch.Generator().manual_seed(5)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=noise) * hidden**-0.5

    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = normal(hidden, hidden)
            tensors[f"{head}.{block}.linear.bias"] = normal(hidden)
        if own_heads:
            tensors[f"{head}.{num_blocks}.weight"] = normal(vocab, hidden)
    return tensors


def save_counting_target(folder: Path) -> Path:
    """A target that says token + 1, in a circle, with odds that leave other tokens a chance when sampled."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=EOS_TOKEN_ID, bos_token_id=256,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(7)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(_embedding())
        model.lm_head.weight.copy_(_head_that_adds(1))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_counting_medusa(folder: Path, *, num_heads: int = 3) -> Path:
    """Heads of the counting target that are right: head k adds k + 2 to the token whose state it sees."""
    tensors = {}
    for head in range(num_heads):
        tensors[f"{head}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{head}.1.weight"] = _head_that_adds(head + 2)
    return save_medusa(folder, tensors, num_heads=num_heads, num_blocks=1)


def _embedding() -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(3)))


def _head_that_adds(count: int) -> torch.Tensor:
    weight = torch.zeros(VOCAB_SIZE, HIDDEN)
    weight[(torch.arange(CIRCLE) + count) % CIRCLE] = _embedding()[:CIRCLE]
    return weight
