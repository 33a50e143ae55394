"""Tiny random checkpoints of each family, and transformers' own logits and tokens as the oracle."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.interface import Platform
from paceline.engine.batch import Batch
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import DecoderConfig, LlamaShape, read_transformers_config
from paceline.engine.decoder import Decoder
from paceline.engine.kv import KVCache
from paceline.engine.llama_reader import LlamaReader
from paceline.engine.loading import load_decoder
from tests.unit.engine.plain_reference import PlainPlatform

VOCAB = 97
PROMPT: list[int] = np.random.default_rng(3).integers(2, VOCAB, 45).tolist()
TABLE = [3, 1, 6, 2]
OTHER_TABLE = [4, 0, 5, 7]
SCRATCH = [8 * BLOCK_SIZE + offset for offset in (3, 0, 9, 10, 17, 18, 40, 41)]
NUM_BLOCKS = 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **SIZES,
        "head_dim": 16,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    # Sums longer than 1,024, where oneDNN computes a lone row by another kernel.
    "mistral": {
        **SIZES,
        "intermediate_size": 2304,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    },
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {
        **SIZES,
        "head_dim": 24,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A checkpoint on disk and the same model in transformers."""

    folder: Path
    oracle: PreTrainedModel

    def load(self, dtype: str = "float32") -> Decoder:
        return load_decoder(self.folder, dtype, "cpu")

    def load_plain(self) -> Decoder:
        return self.load_on(PlainPlatform())

    def load_on(self, platform: Platform, dtype: torch.dtype = torch.float32) -> Decoder:
        described = read_transformers_config(self.folder)
        config = DecoderConfig.from_transformers(described, self.folder)
        shape = LlamaShape.from_transformers(described, config.head_dim)
        reader = LlamaReader(Checkpoint(self.folder), config, shape, dtype, platform)
        return Decoder(platform.llama(config, shape, reader.read()))

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.oracle(torch.tensor([token_ids])).logits[0]
        return logits

    def generate(self, prompt: list[int], count: int) -> list[int]:
        with torch.no_grad():
            out = self.oracle.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
        tokens: list[int] = out[0, len(prompt) :].tolist()
        return tokens


def save_tiny(folder: Path, model_type: str, options: dict[str, Any]) -> TinyModel:
    logging.disable_progress_bar()
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.save_pretrained(folder)
    # generate() must not stop early: the tests compare a fixed number of tokens.
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return TinyModel(folder=folder, oracle=model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a batch, as a test writes it down."""

    token_id: int
    position: int
    sequence: int = 0
    ancestors: tuple[int, ...] = ()
    context_len: int | None = None


def pack(rows: list[Row], tables: list[list[int]], wanted: list[int] | None = None) -> Batch:
    """Rows to a batch: rows with ancestors are tree nodes, the others write into their sequence's blocks."""
    widest = max(len(table) for table in tables)
    block_tables = np.zeros((len(tables), widest), dtype=np.int32)
    for index, table in enumerate(tables):
        block_tables[index, : len(table)] = table
    depth = max(len(row.ancestors) for row in rows)
    ancestors = np.full((len(rows), depth), 12345678, dtype=np.int32)
    slots = np.empty(len(rows), dtype=np.int64)
    for index, row in enumerate(rows):
        ancestors[index, : len(row.ancestors)] = row.ancestors
        block = tables[row.sequence][row.position // BLOCK_SIZE] if not row.ancestors else 0
        slots[index] = row.ancestors[-1] if row.ancestors else block * BLOCK_SIZE + row.position % BLOCK_SIZE
    context_lens = [row.position + 1 if row.context_len is None else row.context_len for row in rows]
    return Batch(
        token_ids=np.array([row.token_id for row in rows], dtype=np.int64),
        positions=np.array([row.position for row in rows], dtype=np.int64),
        slots=slots,
        sequences=np.array([row.sequence for row in rows], dtype=np.int32),
        context_lens=np.array(context_lens, dtype=np.int32),
        ancestors=ancestors,
        num_ancestors=np.array([len(row.ancestors) for row in rows], dtype=np.int32),
        block_tables=block_tables,
        logit_rows=np.array(range(len(rows)) if wanted is None else wanted, dtype=np.int64),
    )


def chain(token_ids: list[int], start: int = 0, sequence: int = 0) -> list[Row]:
    """Rows that continue a sequence's committed prefix from position `start`."""
    return [
        Row(token_id=token_id, position=start + index, sequence=sequence) for index, token_id in enumerate(token_ids)
    ]


def branch(token_ids: list[int], prefix: int, slots: list[int], sequence: int = 0, after: int = 0) -> list[Row]:
    """Tree rows of a path below a committed prefix; the path's first `after` tokens are there already."""
    return [
        Row(
            token_id=token_ids[index],
            position=prefix + index,
            sequence=sequence,
            ancestors=tuple(slots[: index + 1]),
            context_len=prefix,
        )
        for index in range(after, len(token_ids))
    ]


def greedy(decoder: Decoder, cache: KVCache, prompt: list[int], count: int, table: list[int]) -> list[int]:
    """Plain decoding, one row a step."""
    tokens = list(prompt)
    logits = decoder.forward(pack(chain(tokens), [table], [len(tokens) - 1]), cache)
    for _ in range(count):
        tokens.append(int(logits[0].argmax()))
        logits = decoder.forward(pack(chain(tokens[-1:], len(tokens) - 1), [table]), cache)
    return tokens[len(prompt) :]


def assert_prompt_and_tree_match(decoder: Decoder, model: TinyModel) -> None:
    """Logits equal transformers' for a prompt in one chunk, in two, token by token, and as a tree."""
    for cuts in ([0, 45], [0, 18, 45], list(range(46))):
        cache = decoder.new_cache(NUM_BLOCKS)
        parts = [
            decoder.forward(pack(chain(PROMPT[first:last], first), [TABLE]), cache)
            for first, last in itertools.pairwise(cuts)
        ]
        torch.testing.assert_close(torch.cat(parts), model.logits(PROMPT), atol=1e-4, rtol=1e-4)
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT[:37]), [TABLE]), cache)
    left, right = PROMPT[37:41], [*PROMPT[37:39], 5, 6]
    rows = branch(left, 37, SCRATCH[:4]) + branch(right, 37, SCRATCH[:2] + SCRATCH[4:6], after=2)
    logits = decoder.forward(pack(rows, [TABLE]), cache)
    torch.testing.assert_close(logits[:4], model.logits(PROMPT[:37] + left)[37:], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[4:], model.logits(PROMPT[:37] + right)[39:], atol=1e-4, rtol=1e-4)
