"""Widens a checkpoint's feed-forward layers with neurons that have no effect.

The new rows of the gate and up projections are small random numbers, the new columns of the down projection are exactly
zero: every new neuron does real work whose result is multiplied by zero. So the model writes what it wrote before and
costs what a larger model costs. Benches must call it widened.

Adding zeros changes no sum. A kernel that splits a longer inner dimension at other places may still add the old terms
in another order: for the demo target, float32 logits came out bit-equal, and so did bfloat16 ones of few rows; with 128
rows in one bfloat16 product some differ by a rounding.
"""

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

PRESETS = {"98m": 12_288, "400m": 51_200}
"""Intermediate sizes that take the demo target to about 98 and 398 million parameters."""

NEW_WEIGHT_STD = 0.02
MAX_SHARD_BYTES = 1 << 30
_PROJECTION = re.compile(r"\.mlp\.(gate|up|down)_proj\.(weight|bias)$")


def widen(source: Path, out: Path, intermediate_size: int, seed: int = 0) -> int:
    """Write a widened copy of a Llama-family checkpoint folder.

    The folder appears under its name only when it is complete.

    Args:
        source: config.json and safetensors; tokenizer files are copied along.
        out: must not exist, or must be empty.
        intermediate_size: neurons of each feed-forward layer afterwards.
        seed: of the new rows.

    Returns:
        The number of parameters written.

    Raises:
        FileNotFoundError: `source` lacks config.json or weights.
        FileExistsError: `out` holds something.
        ValueError: `intermediate_size` is not above the source's.
    """
    config = _read_config(source)
    old_size = int(config["intermediate_size"])
    if intermediate_size <= old_size:
        raise ValueError(f"intermediate_size is {intermediate_size}, must be above {old_size}")
    if out.is_dir() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _copy_other_files(source, partial)
    config["intermediate_size"] = intermediate_size
    config["paceline_widened_from"] = {"name": source.name, "intermediate_size": old_size}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(seed)
    widened = ((name, widen_tensor(name, tensor, intermediate_size, generator)) for name, tensor in _tensors(source))
    count = _write_shards(widened, partial)
    if out.is_dir():
        out.rmdir()
    os.replace(partial, out)
    return count


def widen_tensor(name: str, tensor: torch.Tensor, intermediate_size: int, generator: torch.Generator) -> torch.Tensor:
    """The tensor with its intermediate dimension grown; tensors of other layers as they are.

    Args:
        name: as in the checkpoint, such as `model.layers.0.mlp.up_proj.weight`.
        tensor: `[intermediate, hidden]` for gate and up, `[hidden, intermediate]` for down.
        intermediate_size: the new dimension.
        generator: of the new gate and up rows.
    """
    match = _PROJECTION.search(name)
    if match is None or (match[1] == "down" and match[2] == "bias"):
        return tensor
    axis = 1 if match[1] == "down" else 0
    shape = list(tensor.shape)
    shape[axis] = intermediate_size - tensor.shape[axis]
    if match[1] == "down" or match[2] == "bias":
        extra = torch.zeros(shape, dtype=tensor.dtype)
    else:
        extra = torch.randn(shape, generator=generator).mul_(NEW_WEIGHT_STD).to(tensor.dtype)
    return torch.cat([tensor, extra], dim=axis)


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{source} holds no config.json")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def _copy_other_files(source: Path, out: Path) -> None:
    for path in source.iterdir():
        is_weights = ".safetensors" in path.name
        if path.is_file() and not is_weights and path.name not in ("config.json", "README.md"):
            shutil.copyfile(path, out / path.name)
    (out / "README.md").write_text(f"# {source.name}, widened\n\n{__doc__.strip()}\n", encoding="utf-8")


def _tensors(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    paths = sorted(source.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{source} holds no *.safetensors")
    with ExitStack() as stack:
        for path in paths:
            weights = stack.enter_context(safe_open(str(path), framework="pt"))
            for name in sorted(weights.keys()):
                yield name, weights.get_tensor(name)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], out: Path) -> int:
    """Write one file, or several and their index; returns the number of parameters."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    count = total_bytes = 0
    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append(_save(pending, out / f"part-{len(shards)}"))
            pending = {}
        pending[name] = tensor
        count += tensor.numel()
        total_bytes += tensor.nbytes
    shards.append(_save(pending, out / f"part-{len(shards)}"))
    _name_shards(shards, out, total_bytes)
    return count


def _save(tensors: dict[str, torch.Tensor], path: Path) -> list[str]:
    save_file(tensors, str(path), metadata={"format": "pt"})
    path.chmod(0o644)
    return list(tensors)


def _name_shards(shards: list[list[str]], out: Path, total_bytes: int) -> None:
    """Names carry the number of files, which is known only at the end."""
    if len(shards) == 1:
        os.replace(out / "part-0", out / "model.safetensors")
        return
    weight_map = {}
    for number, names in enumerate(shards):
        file_name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        os.replace(out / f"part-{number}", out / file_name)
        weight_map.update(dict.fromkeys(names, file_name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    path = out / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Widens the first folder into the second; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m paceline.cluster.widen", description=__doc__)
    parser.add_argument("source", type=Path, help="Llama-family checkpoint folder")
    parser.add_argument("out", type=Path, help="new folder, must not exist")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--preset", choices=sorted(PRESETS), help="size that the demo target grows to")
    size.add_argument("--intermediate-size", type=int, help="neurons of each feed-forward layer")
    parser.add_argument("--seed", type=int, default=0, help="of the new rows (default: %(default)s)")
    args = parser.parse_args()
    try:
        count = widen(args.source, args.out, args.intermediate_size or PRESETS[args.preset], args.seed)
    except (FileNotFoundError, FileExistsError, ValueError) as error:
        sys.stderr.write(f"widen: {error}\n")
        return 2
    sys.stdout.write(f"{args.out}: {count:,} parameters, same function as {args.source}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
