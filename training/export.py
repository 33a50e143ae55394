"""Writes trained models and heads as folders with bfloat16 weights and a model card."""

import copy
import json
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from training.acceptance import acceptance_table
from training.runs import RunConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The variable parts of a model card; figures are measured, in Markdown."""

    title: str
    summary: str
    figures: str


def publish(config: RunConfig, kind: str, summary: str, export: Callable[[Card], object]) -> None:
    """Export to `config.out`, measure what ships, and export again with the figures in the card."""
    title = f"{kind} for {config.target.name}"
    # Figures are measured on the weights as they ship, rounded to bfloat16.
    export(Card(title=title, summary=summary, figures=""))
    figures = acceptance_table(config.target, config.out, num_prompts=40, num_new=128, seed=0)
    sys.stdout.write(figures + "\n")
    text = (
        f"Acceptance along the target's own text, 40 held-out prompts x 128 tokens, float32, after {config.steps} "
        f"steps of {config.batch_tokens:,} tokens (seed {config.seed}):\n\n{figures}"
    )
    export(Card(title=title, summary=summary, figures=text))


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
    config = model.config
    facts = {
        "parameters": f"{_count(model):,} (embeddings and head tied: {bool(config.tie_word_embeddings)})",
        "shape": f"hidden {config.hidden_size}, {config.num_hidden_layers} layers, vocabulary {config.vocab_size}",
        "context": f"{config.max_position_embeddings} tokens (rows of at most 1,024 in training)",
        "weights": "bfloat16 safetensors",
    }
    (out / "README.md").write_text(_card_text(card, "transformers", facts), encoding="utf-8")
    return sum(path.stat().st_size for path in out.glob("*.safetensors"))


def export_heads(heads: nn.Module, layout: Mapping[str, object], out: Path, card: Card) -> int:
    """Write weights, config.json and README.md of heads that work on a target's states.

    Args:
        heads: left as they are; a bfloat16 copy of all that is floating is saved.
        layout: content of config.json.
        out: created where missing; files of the same names are replaced.
        card: the model card.

    Returns:
        Bytes of the weights.
    """
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: (value.bfloat16() if value.is_floating_point() else value).cpu().contiguous()
        for name, value in heads.state_dict().items()
    }
    path = out / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    (out / "config.json").write_text(json.dumps(layout, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    facts = {"parameters": f"{_count(heads):,}", "weights": "bfloat16 safetensors"}
    (out / "README.md").write_text(_card_text(card, "paceline", facts), encoding="utf-8")
    return path.stat().st_size


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _card_text(card: Card, library: str, facts: Mapping[str, str]) -> str:
    rows = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    return f"""---
license: apache-2.0
language: code
library_name: {library}
---
# {card.title}

{card.summary}

| | |
| --- | --- |
{rows}

## Data

Source code of the CPython {platform.python_version()} standard library (tests included), under the
Python Software Foundation License 2.0. {sys.copyright.splitlines()[0]}
About 2 % of the files were held out by a hash of their paths, and a few well-known modules by name.

## Licence

The weights are under the Apache License 2.0, like the rest of Paceline.

## Figures

{card.figures}

## What it is for

Demonstrations and benches of speculative decoding without a download. The demo target
writes text that looks like Python; it is not a useful programming assistant.
"""
