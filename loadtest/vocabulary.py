"""The demo pair with as many token ids as real models have: its vocabulary of 4,096 hides what choosing costs.

The new ids have logits of a real shape: a long tail far below the likely ids, which holds some of the mass at
temperature 0.8 and is never the best choice, so that a drafter agrees with its target as before. No text stands for a
new id; benches with such a pair must say that it is widened.
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
from paceline.checkpoints.corpus import unseen_prompts
from paceline.user_cache import user_cache

# Logits of new ids: the mean, below the logarithm of what the known ids sum up to at this temperature, and how much ids
# differ. 148,000 of them hold a median of 4 % of the mass there.
BELOW, SPREAD, TEMPERATURE = 12.7, 1.0, 0.8
# Prompts after which the hidden states come that new rows are made of, and the tokens of each.
NUM_PROMPTS, MOST_TOKENS = 64, 400
# Ridge of the least squares: states of texts lie in fewer dimensions than they have.
RIDGE = 100.0


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
    out = user_cache(os.environ) / f"{source.parent.name}-{source.name}-{num_ids}-ids"
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
    """Rows `[count, hidden]` whose logits are below those of the known ids after every text."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    prompts = [tokenizer(text)["input_ids"][:MOST_TOKENS] for text in unseen_prompts(NUM_PROMPTS)]
    with torch.no_grad():
        states = torch.cat([model.model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts])
        known = TEMPERATURE * torch.logsumexp(model.lm_head(states) / TEMPERATURE, dim=-1)
    # The level follows the known ids from state to state: one that stays would pass them wherever they are unsure.
    squares = states.T @ states + RIDGE * torch.eye(states.shape[1])
    level = torch.linalg.solve(squares, states.T @ (known - BELOW))
    drawn = torch.randn(count, states.shape[1], generator=torch.Generator().manual_seed(0))
    rows: torch.Tensor = level + drawn * (SPREAD / states.norm(dim=1).mean())
    return rows
