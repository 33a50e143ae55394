"""Writes a trained model as a plain Hugging Face folder with bfloat16 weights and a model card."""

import copy
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a model card says beyond the constant parts; figures are Markdown, measured."""

    title: str
    summary: str
    figures: str


def export_model(model: PreTrainedModel, tokenizer_folder: Path, out: Path, card: Card) -> int:
    """Write weights, config, tokenizer files and README.md.

    Args:
        model: left as it is; a bfloat16 copy is saved.
        tokenizer_folder: source of the tokenizer files, those that exist are copied.
        out: created where missing; files of the same names are replaced.
        card: the model card.

    Returns:
        Bytes of the weights.
    """
    out.mkdir(parents=True, exist_ok=True)
    saved = nn.Module.to(copy.deepcopy(model), device="cpu", dtype=torch.bfloat16)
    saved.config.dtype = torch.bfloat16
    saved.save_pretrained(out)
    for path in out.glob("*.safetensors"):
        # The writer makes files that only their owner may read.
        path.chmod(0o644)
    for name in TOKENIZER_FILES:
        source = tokenizer_folder / name
        if source.is_file() and source.resolve() != (out / name).resolve():
            shutil.copyfile(source, out / name)
    (out / "README.md").write_text(_card_text(card, model), encoding="utf-8")
    return sum(path.stat().st_size for path in out.glob("*.safetensors"))


def _card_text(card: Card, model: PreTrainedModel) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = model.config
    return f"""---
license: apache-2.0
language: code
library_name: transformers
---
# {card.title}

{card.summary}

| | |
| --- | --- |
| parameters | {parameters:,} (embeddings and head tied: {bool(config.tie_word_embeddings)}) |
| shape | hidden {config.hidden_size}, {config.num_hidden_layers} layers, vocabulary {config.vocab_size} |
| context | {config.max_position_embeddings} tokens (rows of at most 1,024 in training) |
| weights | bfloat16 safetensors |

## Data

Source code of the CPython {platform.python_version()} standard library (tests included), under the
Python Software Foundation License 2.0. {sys.copyright.splitlines()[0]}
About 2 % of the files were held out by a hash of their paths, and a few well-known modules by name.

## Licence

The weights are under the Apache License 2.0, like the rest of Paceline.

## Figures

{card.figures}

## What it is for

Demonstrations and benches of speculative decoding without a download. It writes text that looks
like Python; it is not a useful programming assistant.
"""
