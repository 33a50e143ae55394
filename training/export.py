"""Writes trained models and heads as folders with bfloat16 weights and a model card."""

import copy
import json
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from training.acceptance import acceptance_table
from training.runs import RunConfig
from training.text import read_prompts

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


STANDARD_LIBRARY = f"""Source code of the CPython {platform.python_version()} standard library (tests included), under
the Python Software Foundation License 2.0. {sys.copyright.splitlines()[0]}
About 2 % of the files were held out by a hash of their paths, and a few well-known modules by name."""
_LICENCE_LINE = re.compile(r"^license:[ \t]*(\S+)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The variable parts of a model card, in Markdown; figures are measured.

    Attributes:
        data: Text that was learnt, and its licence.
        licence: SPDX name; None: it is not known.
        purpose: A last section; None: there is none.
    """

    title: str
    summary: str
    figures: str
    data: str
    licence: str | None
    purpose: str | None = None


def publish(config: RunConfig, kind: str, summary: str, export: Callable[[Card], object]) -> None:
    """Export to `config.out`, measure the result, and export again with the figures in the card."""
    card = Card(
        title=f"{kind} for {config.target.name}",
        summary=summary,
        figures=f"Not measured. {config.steps} steps of {config.batch_tokens:,} tokens (seed {config.seed}).",
        data=config.data or _data_of(config),
        licence=config.licence or licence_of(config.target),
    )
    export(card)
    if not config.closing_prompts:
        return
    # Figures are of the exported weights, rounded to bfloat16.
    prompts = read_prompts(config)
    held_out = None if prompts is None else prompts.held_out
    figures = acceptance_table(config.target, config.out, held_out, config.closing_prompts, num_new=128, seed=0)
    sys.stdout.write(figures + "\n")
    count = config.closing_prompts if held_out is None else min(config.closing_prompts, len(held_out))
    text = (
        f"Acceptance along the target's own text, {count} held-out prompts, at most 128 tokens each, float32, after "
        f"{config.steps} steps of {config.batch_tokens:,} tokens (seed {config.seed}):\n\n{figures}"
    )
    export(replace(card, figures=text))


def licence_of(target: Path) -> str | None:
    """Licence that the model card of a folder names."""
    card = target / "README.md"
    found = _LICENCE_LINE.search(card.read_text(encoding="utf-8")) if card.is_file() else None
    return found[1] if found else None


def _data_of(config: RunConfig) -> str:
    """Names of the files that a run read."""
    told = []
    if config.prompts_file is not None:
        told.append(f"Answers of `{config.target.name}` to the prompts of `{config.prompts_file.name}`.")
    if config.corpus is not None:
        told.append(
            f"Text of `{config.corpus.name}`, and what `{config.target.name}` wrote after pieces or prompts of it."
        )
    return " ".join(told) + " Their licences are not stated." if told else STANDARD_LIBRARY


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
        "context": f"{config.max_position_embeddings} tokens",
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
    licence = f"license: {card.licence}\n" if card.licence else ""
    sections = {
        "Data": card.data,
        "Licence": f"`{card.licence}`"
        if card.licence
        else "Not stated: neither the target's card nor `--licence` names one.",
        "Figures": card.figures,
    } | ({"What it is for": card.purpose} if card.purpose else {})
    table = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items())
    return f"""---
{licence}library_name: {library}
---
# {card.title}

{card.summary}

| | |
| --- | --- |
{table}

{text}
"""
