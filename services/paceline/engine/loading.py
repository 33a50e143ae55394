"""Loads a decoder from a checkpoint folder: chooses its platform, the kind of its weights and its back end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

import numpy as np
import torch

from paceline.checkpoints.families import LEAN_ARCHITECTURES
from paceline.core.errors import ConfigError
from paceline.core.pages import BlockPool, SessionPages
from paceline.engine.backends.choice import choose_platform
from paceline.engine.backends.interface import Platform
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import (
    DecoderConfig,
    LlamaShape,
    read_transformers_config,
)
from paceline.engine.decoder import Decoder
from paceline.engine.llama_reader import LlamaReader
from paceline.engine.packing import BatchBuilder, TreeRow

logger = logging.getLogger(__name__)

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_dtype(dtype: str, checkpoint: Checkpoint, platform: Platform) -> torch.dtype:
    """Returns the type that a checkpoint's weights are served in; "auto" takes none that the platform only emulates.

    Raises:
        ConfigError: The name is none of those known.
    """
    if dtype == "auto":
        kinds = {checkpoint.tensor(name).dtype for name in checkpoint.names if "embed" in name}
        stored_wide = kinds <= {torch.float32, torch.float64}
        return torch.float32 if stored_wide or platform.emulates_bfloat16 else torch.bfloat16
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be bfloat16, float32 or auto, got {dtype!r}")
    return _DTYPES[dtype]


def load_decoder(folder: Path, dtype: str = "auto", device: str = "auto", num_threads: int | None = None) -> Decoder:
    """Loads a checkpoint folder.

    Args:
        folder: In the Hugging Face format, with safetensors.
        dtype: Of the weights: "bfloat16", "float32" or "auto" (as stored; float16 becomes bfloat16, and both float32
            on a CPU that only emulates bfloat16).
        device: "cpu", "cuda" or "auto" (CUDA if there is one).
        num_threads: CPU threads of the linear layers, for the whole process; None leaves torch's choice.

    Raises:
        ConfigError: The folder or a setting makes serving impossible; says what to do.
    """
    platform = choose_platform(device)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    described = read_transformers_config(folder)
    config = DecoderConfig.from_transformers(described, folder)
    checkpoint = Checkpoint(folder)
    kind = choose_dtype(dtype, checkpoint, platform)
    if kind is torch.bfloat16 and platform.emulates_bfloat16:
        logger.warning(
            "this CPU emulates bfloat16: slow, and with several threads tokens may depend on the batch; "
            "--dtype auto takes float32, which is neither, for twice the memory"
        )
    if config.architecture not in LEAN_ARCHITECTURES:
        from paceline.engine.backends.generic.backend import GenericBackend

        return Decoder(GenericBackend.load(folder, config, kind, platform))
    shape = LlamaShape.from_transformers(described, config.head_dim)
    weights = LlamaReader(checkpoint, config, shape, kind, platform).read()
    decoder = Decoder(platform.llama(config, shape, weights))
    warm_up(decoder)
    return decoder


def warm_up(decoder: Decoder) -> None:
    """Runs one row and one copy, so that no request waits for compilation (0.2 s, 15 s the first time ever)."""
    builder, width = BatchBuilder(), decoder.feature_width
    features = np.zeros((1, width), np.float32) if width else None
    builder.add_nodes([TreeRow(SessionPages([], BlockPool(0)), 0, 0, (0,))], features)
    cache = decoder.new_cache(1)
    decoder.forward(builder.build(), cache)
    cache.copy_slots(np.zeros(1, np.int64), np.ones(1, np.int64))
