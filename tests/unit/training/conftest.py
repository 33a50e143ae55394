"""A tiny tokenizer and models of its vocabulary: seconds on one core."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from training.export import Card, export_model
from training.tokenizer import BEGIN_ID, END_ID, save_tokenizer, train_tokenizer

VOCAB_SIZE = 320


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are faster on one thread, and tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(
        ["def add(left, right):\n    return left + right\n" * 20, "class Heap:\n    pass\n" * 20],
        VOCAB_SIZE,
    )


@pytest.fixture
def tiny_config() -> LlamaConfig:
    """Grouped heads and tied embeddings, as in many small checkpoints."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=BEGIN_ID,
        eos_token_id=END_ID,
        initializer_range=0.2,
    )


@pytest.fixture
def target_folder(tmp_path: Path, tokenizer: Tokenizer, tiny_config: LlamaConfig) -> Path:
    torch.manual_seed(0)
    save_tokenizer(tokenizer, tmp_path / "tokenizer", 2048)
    out = tmp_path / "target"
    card = Card(title="tiny", summary="For tests.", figures="none", data="None.", licence="apache-2.0")
    export_model(LlamaForCausalLM(tiny_config), tmp_path / "tokenizer", out, card)
    return out
