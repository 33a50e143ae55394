"""Tensors of a Hugging Face checkpoint folder by name; reads safetensors only and knows no model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline.checkpoints.source import INDEX, unreadable_weights
from paceline.core.errors import ConfigError


class Checkpoint:
    """The tensors of a folder; each read returns a fresh tensor."""

    def __init__(self, folder: Path) -> None:
        """Opens every shard.

        Raises:
            ConfigError: No safetensors, a missing shard, or a damaged file; says what to do.
        """
        self._folder = folder
        self._shards = {}
        self._shard_of: dict[str, Path] = {}
        for path in _shard_paths(folder):
            try:
                shard = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
            self._shards[path] = shard
            self._shard_of.update(dict.fromkeys(shard.keys(), path))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shard_of)

    @property
    def paths(self) -> list[Path]:
        return sorted(self._shards)

    @property
    def num_parameters(self) -> int:
        """How many numbers all tensors have together, by the headers of the files."""
        return sum(math.prod(self._shards[path].get_slice(name).get_shape()) for name, path in self._shard_of.items())

    def has(self, name: str) -> bool:
        return name in self._shard_of

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """Reads a tensor.

        Raises:
            ConfigError: It is missing, or has another shape than the config asks for.
        """
        if name not in self._shard_of:
            raise ConfigError(f"{self._folder} lacks the tensor {name!r} that its config.json asks for")
        tensor: torch.Tensor = self._shards[self._shard_of[name]].get_tensor(name)
        if shape is not None and tensor.shape != shape:
            raise ConfigError(
                f"{self._folder}: tensor {name!r} is {list(tensor.shape)}, config.json asks for {list(shape)}"
            )
        return tensor


def _shard_paths(folder: Path) -> list[Path]:
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            paths = sorted({folder / Path(name).name for name in weight_map.values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is not a safetensors index: {error!r}") from error
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ConfigError(f"{index} names shards that are not there: {', '.join(missing)}; copy them too")
        return paths
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise unreadable_weights((path.name for path in folder.iterdir()), folder)
    return paths
