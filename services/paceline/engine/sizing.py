"""What a model will take of memory, by its files: no weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.checkpoints.families import LEAN_ARCHITECTURES
from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.choice import choose_platform
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import DecoderConfig
from paceline.engine.loading import choose_dtype

# A row of logits is there as the model gives it, and as processors leave it.
LOGIT_BYTES = 2 * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """What one model takes, by its files.

    Attributes:
        weight_bytes: As served; while it loads no more is held.
        page_bytes: KV of one page.
        logit_bytes: Of one row of a step.
    """

    weight_bytes: int
    page_bytes: int
    logit_bytes: int


def model_needs(folder: Path, dtype: str, device: str, *, state_width: int = 0) -> ModelNeeds:
    """Reads what a model takes from the headers of its weight files.

    Args:
        folder: Checkpoint folder.
        dtype: As in `load_decoder`.
        device: As in `load_decoder`.
        state_width: Numbers kept beside the KV of each token, in units of the model's hidden size.

    Raises:
        ConfigError: It is no checkpoint that can be served.
    """
    platform, config, checkpoint = choose_platform(device), DecoderConfig.from_folder(folder), Checkpoint(folder)
    itemsize = choose_dtype(dtype, checkpoint, platform).itemsize
    # The generic decoder loads float32 where linears are packed, and keeps KV in it.
    wide = platform.packs and config.architecture not in LEAN_ARCHITECTURES
    kept = torch.float32.itemsize if wide else itemsize
    numbers = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return ModelNeeds(
        weight_bytes=checkpoint.num_parameters * kept,
        page_bytes=BLOCK_SIZE * (numbers + state_width * config.num_heads * config.head_dim) * kept,
        logit_bytes=LOGIT_BYTES * config.vocab_size,
    )
