"""Identity of a checkpoint that vLLM serves: any architecture, read from its JSON files."""

from __future__ import annotations

from pathlib import Path

from paceline.checkpoints.families import text_config
from paceline.checkpoints.identity import eos_token_ids, fingerprint, vocab_hash
from paceline.checkpoints.json_files import CONFIG, read_object, whole
from paceline.checkpoints.source import served_name
from paceline.core.errors import ConfigError
from paceline.core.messages import VLLM_ARITHMETIC, ModelIdentity
from paceline.core.params import DRAFT_MODEL, REJECTION

# vLLM loads the first kind that exists.
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def vllm_identity(folder: Path, name: str, *, context_len: int, versions: str, precision: str) -> ModelIdentity:
    """Returns the identity of a model under vLLM; the same model has another one in our engine.

    Args:
        name: Name for users; empty: see `served_name`.
        context_len: Longest session that vLLM allows.
        versions: Versions of vLLM and what it computes with.
        precision: Settings that decide the logits besides the weights, such as their type and quantisation.

    Raises:
        ConfigError: A file is missing or incomplete.
    """
    path = checkpoint_folder(folder)
    config = read_object(path / "config.json")
    # At the top, or in the part of a model that reads more than text.
    given = config.get("vocab_size") or text_config(config).get("vocab_size")
    vocab_size = whole(given, f"{path / CONFIG}: vocab_size")
    arithmetic = f"{VLLM_ARITHMETIC}{versions}, {precision}"
    return ModelIdentity(
        name=name or served_name(path),
        vocab_hash=vocab_hash(path),
        vocab_size=vocab_size,
        context_len=context_len,
        eos_token_ids=eos_token_ids(path, config.get("eos_token_id"), vocab_size),
        weights_hash=fingerprint([arithmetic.encode(), (path / "config.json").read_bytes()], _weights(path)),
        arithmetic=arithmetic,
        methods=(DRAFT_MODEL,),
        acceptance_rules=(REJECTION,),
    )


def checkpoint_folder(folder: Path) -> Path:
    """The folder with `~` replaced.

    Raises:
        ConfigError: It does not exist.
    """
    path = folder.expanduser()
    if not path.is_dir():
        raise ConfigError(f"--model {folder}: no such folder; give a checkpoint in Hugging Face layout")
    return path


def _weights(folder: Path) -> list[Path]:
    found = next((paths for pattern in WEIGHT_FILES if (paths := sorted(folder.glob(pattern)))), None)
    if found is None:
        raise ConfigError(f"{folder} has no weights: there is no file {', '.join(WEIGHT_FILES)}")
    return found
