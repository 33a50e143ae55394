"""Widens the demo target's feed-forward layers with neurons that have no effect: `SOURCE OUT INTERMEDIATE_SIZE`.

The new rows of the gate and up projections are small random numbers, the new columns of the down projection are exactly
zero: every new neuron does real work whose result is multiplied by zero. So the model writes what it wrote before and
costs what a larger model costs. Benches must call it widened.

Adding zeros changes no sum. A kernel that splits a longer inner dimension at other places may still add the old terms
in another order: for the demo target, float32 logits came out bit-equal, and so did bfloat16 ones of few rows; with 128
rows in one bfloat16 product some differ by a rounding.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NEW_WEIGHT_STD = 0.02


def widen(source: Path, out: Path, intermediate_size: int) -> None:
    """Writes a widened copy of a Llama-family checkpoint folder; it appears under its name only when it is complete."""
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    try:
        shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors"))
        (partial / "README.md").write_text(f"# {source.name}, widened\n\n{__doc__}", encoding="utf-8")
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        old = {"name": source.name, "intermediate_size": config["intermediate_size"]}
        config |= {"intermediate_size": intermediate_size, "paceline_widened_from": old}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        generator = torch.Generator().manual_seed(0)
        tensors = load_file(source / "model.safetensors")
        widened = {name: _widened(name, tensors[name], intermediate_size, generator) for name in sorted(tensors)}
        save_file(widened, partial / "model.safetensors", metadata={"format": "pt"})
        (partial / "model.safetensors").chmod(0o644)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _widened(name: str, tensor: torch.Tensor, intermediate_size: int, generator: torch.Generator) -> torch.Tensor:
    """The tensor for that size; tensors of other kinds as they are."""
    if ".mlp." not in name:
        return tensor
    is_down = "down_proj" in name
    shape = list(tensor.shape)
    shape[int(is_down)] = intermediate_size - tensor.shape[int(is_down)]
    extra = torch.zeros(shape) if is_down else torch.randn(shape, generator=generator).mul_(NEW_WEIGHT_STD)
    return torch.cat([tensor, extra.to(tensor.dtype)], dim=int(is_down))


if __name__ == "__main__":
    widen(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
