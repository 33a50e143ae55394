"""How a checkpoint introduces itself to the fleet."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoints.identity import fingerprint, vocab_hash
from paceline.checkpoints.source import served_name
from paceline.core.errors import ConfigError
from paceline.core.messages import ModelIdentity
from paceline.engine.backends.choice import choose_platform
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import DecoderConfig
from paceline.engine.loading import choose_dtype


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
        weights_hash=weights_hash(path, dtype, device),
        arithmetic=choose_platform(device).arithmetic,
    )


def weights_hash(folder: Path, dtype: str, device: str = "auto") -> str:
    """Returns a fingerprint of all that decides a model's logits: configuration, weights (sampled) and their type.

    Raises:
        ConfigError: The folder holds no weights that can be served.
    """
    checkpoint = Checkpoint(folder)
    served_in = str(choose_dtype(dtype, checkpoint, choose_platform(device))).encode()
    return fingerprint([served_in, (folder / "config.json").read_bytes()], checkpoint.paths)
