"""Loads a decoder from a checkpoint folder: chooses its platform, the kind of its weights and its back end.

Also how the checkpoint introduces itself to the fleet.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import torch

from paceline.checkpoints.families import LEAN_ARCHITECTURES
from paceline.checkpoints.identity import fingerprint, vocab_hash
from paceline.checkpoints.source import served_name
from paceline.core.errors import ConfigError
from paceline.core.messages import ModelIdentity
from paceline.core.pages import BlockPool, SessionPages
from paceline.engine.backends.cpu.platform import CpuPlatform
from paceline.engine.backends.cpu.simd import CPU_NAME, FUSES
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


def choose_platform(device: str) -> Platform:
    """The platform of a setting: "cpu", "cuda" or "auto" (CUDA if there is one).

    Raises:
        ConfigError: The name is none of those known, there is no such device, or what it needs is not installed.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu, cuda or auto, got {device!r}")
    if device == "cpu":
        return CpuPlatform()
    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: this machine has no usable GPU; use cpu or auto")
    if find_spec("triton") is None:
        raise ConfigError("--device cuda: needs Triton, which torch for CUDA brings along; use cpu, or install triton")
    # Kernels are compiled by Triton, which nobody needs who has no GPU.
    from paceline.engine.backends.cuda.platform import CudaPlatform

    return CudaPlatform(torch.device(device))


logger = logging.getLogger(__name__)

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def choose_dtype(dtype: str, checkpoint: Checkpoint) -> torch.dtype:
    """Returns the type that a checkpoint's weights are served in.

    Raises:
        ConfigError: The name is none of those known.
    """
    if dtype == "auto":
        kinds = {checkpoint.tensor(name).dtype for name in checkpoint.names if "embed" in name}
        return torch.float32 if kinds <= {torch.float32, torch.float64} else torch.bfloat16
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype must be bfloat16, float32 or auto, got {dtype!r}")
    return _DTYPES[dtype]


def load_decoder(folder: Path, dtype: str = "auto", device: str = "auto", num_threads: int | None = None) -> Decoder:
    """Loads a checkpoint folder.

    Args:
        folder: In the Hugging Face format, with safetensors.
        dtype: Type of the weights: "bfloat16", "float32" or "auto" (as stored; float16 becomes bfloat16).
        device: "cpu", "cuda" or "auto" (CUDA if there is one).
        num_threads: CPU threads of the linear layers, for the whole process; None leaves torch's choice.

    Raises:
        ConfigError: The folder or a setting makes serving impossible; says what to do.
    """
    platform = choose_platform(device)
    if platform.device.type == "cpu" and not FUSES:
        logger.warning("this CPU (%s) has no fused multiply-add: texts may differ from those of CPUs that do", CPU_NAME)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    described = read_transformers_config(folder)
    config = DecoderConfig.from_transformers(described, folder)
    checkpoint = Checkpoint(folder)
    kind = choose_dtype(dtype, checkpoint)
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


def model_identity(
    folder: Path, name: str = "", dtype: str = "auto", device: str = "auto", *, max_model_len: int = 0
) -> ModelIdentity:
    """Reads what must agree between verifier, drafter and gateway, without loading weights.

    Args:
        name: Name for users; empty: see `served_name`.
        dtype: Weight type asked for, see `load_decoder`.
        device: Where, see `load_decoder`.
        max_model_len: Longest session asked for; stretches the context as far as YaRN in config.json does.

    Raises:
        ConfigError: The folder is missing, or is no checkpoint that can be served.
    """
    path = folder.expanduser()
    if not path.is_dir():
        raise ConfigError(f"--model {folder}: no such folder; give a checkpoint in Hugging Face layout")
    config = DecoderConfig.from_folder(path)
    return ModelIdentity(
        name=name or served_name(path),
        vocab_hash=vocab_hash(path),
        vocab_size=config.vocab_size,
        context_len=max(config.context_len, min(max_model_len, config.longest_context_len)),
        eos_token_ids=config.eos_token_ids,
        weights_hash=weights_hash(path, dtype),
        arithmetic=choose_platform(device).arithmetic,
    )


def weights_hash(folder: Path, dtype: str) -> str:
    """Returns a fingerprint of all that decides a model's logits: configuration, weights (sampled) and their type.

    Raises:
        ConfigError: The folder holds no weights that can be served.
    """
    checkpoint = Checkpoint(folder)
    served_in = str(choose_dtype(dtype, checkpoint)).encode()
    return fingerprint([served_in, (folder / "config.json").read_bytes()], checkpoint.paths)
