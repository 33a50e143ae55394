"""The demo pair with as many token ids as real models have: its vocabulary of 4,096 hides what choosing costs.

The new ids have logits of a real shape, a long tail far below the likely ids: at temperature 0.8 some of the mass is in
it, and at top-p 0.95 the nucleus holds some tens of ids. `SHAPE` says how far below. No text stands for a new id, so
texts mean nothing; benches with such a pair must say that it is widened.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from loadtest.fleet import say
from paceline.user_cache import user_cache

# Mean logit of a new id below that of the known ones, and how it varies from one place of a text to another.
SHAPE = (-6.0, 2.0)
# Where the hidden states come from that new rows are made of.
TEXT = Path(json.__file__)
TEXT_CHARS, MOST_TOKENS = 6_000, 800


def with_vocabulary(settings: dict[str, Any], num_ids: int) -> dict[str, Any]:
    """`FleetSpec` settings of a pair with both models widened to so many ids, made once and kept; 0: as is."""
    models = ("model", "draft_model") if num_ids else ()
    return {**settings, **{key: widened(settings[key], num_ids) for key in models}}


def widened(source: Path, num_ids: int) -> Path:
    """A copy of a Llama-family checkpoint with `num_ids` ids; it appears under its name only when it is complete.

    Raises:
        ValueError: The checkpoint has as many already.
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config["vocab_size"] >= num_ids:
        raise ValueError(
            f"--vocab must be more than the {config['vocab_size']:,} ids of {source.name}, got {num_ids:,}"
        )
    out = user_cache(os.environ) / f"{source.parent.name}-{source.name}-{num_ids}"
    if out.exists():
        return out
    say(f"widening the vocabulary of {source.name} to {num_ids:,} ids, once: {out}")
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors"))
        (partial / "config.json").write_text(json.dumps(config | {"vocab_size": num_ids}, indent=2), encoding="utf-8")
        save_file(_weights(source, config["vocab_size"], num_ids), partial / "model.safetensors", {"format": "pt"})
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return out


def _weights(source: Path, old: int, new: int) -> dict[str, torch.Tensor]:
    """All tensors, with rows for the new ids in those that have one an id."""
    tensors = load_file(source / "model.safetensors")
    rows = _new_rows(source, new - old)
    per_id = ("embed_tokens.weight", "lm_head.weight")
    return {
        name: torch.cat([tensor, rows.to(tensor.dtype)]) if name.endswith(per_id) else tensor
        for name, tensor in tensors.items()
    }


def _new_rows(source: Path, count: int) -> torch.Tensor:
    """Rows `[count, hidden]` whose logits are as `SHAPE` says, after hidden states of a real text."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(source)(TEXT.read_text(encoding="utf-8")[:TEXT_CHARS])["input_ids"]
    with torch.no_grad():
        states = model.model(torch.tensor([tokens[:MOST_TOKENS]])).last_hidden_state[0]
        logits = model.lm_head(states)
    below, spread = SHAPE
    mean = states.mean(0)
    direction = mean / mean.norm()
    # All hidden states have a part along their mean: it sets the level, and what is drawn the differences.
    level = (logits.mean() + below) / (states @ direction).mean()
    drawn = torch.randn(count, len(mean), generator=torch.Generator().manual_seed(0))
    rows: torch.Tensor = direction * level + drawn * (spread / states.norm(dim=1).mean())
    return rows
