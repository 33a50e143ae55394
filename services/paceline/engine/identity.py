"""How a checkpoint introduces itself to the fleet."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.messages import ModelIdentity
from paceline.engine.config import DecoderConfig
from paceline.vocabulary import vocab_hash


def model_identity(folder: Path, name: str = "") -> ModelIdentity:
    """Reads what must agree between verifier, drafter and gateway, without loading weights.

    Args:
        folder: Checkpoint folder.
        name: Name for users; empty: the folder's.

    Raises:
        ConfigError: The folder is missing, or is no checkpoint that can be served.
    """
    path = folder.expanduser()
    if not path.is_dir():
        raise ConfigError(f"--model {folder}: no such folder; give a checkpoint in Hugging Face layout")
    config = DecoderConfig.from_folder(path)
    return ModelIdentity(
        name=name or path.resolve().name,
        vocab_hash=vocab_hash(path),
        vocab_size=config.vocab_size,
        context_len=config.context_len,
        eos_token_ids=config.eos_token_ids,
    )
