"""Tiny random checkpoints, made in the test: a target, and drafters that resemble it more or less."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 260
EOS_TOKEN_ID = 257


def save_tokenizer(folder: Path) -> None:
    """One token a byte, and a few special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def save_pair(folder: Path, *, noise: float = 0.02) -> tuple[Path, Path]:
    """Writes a random Llama target and a drafter that is the same model with noise on its weights."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=EOS_TOKEN_ID,
        bos_token_id=256,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    target = LlamaForCausalLM(config).eval()
    _save(target, folder / "target")
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.add_(noise * parameter.std() * torch.randn_like(parameter))
    _save(target, folder / "drafter")
    return folder / "target", folder / "drafter"


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder)
    save_tokenizer(folder)
