"""What makes two checkpoints the same: fingerprint of the weights, vocabulary, and the tokens that end a text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from paceline.checkpoints.json_file import read_object
from paceline.core.errors import ConfigError

# Pieces of each weight file that are hashed, and their size; other weights of the same shape differ everywhere.
NUM_SAMPLES = 1024
SAMPLE_BYTES = 4096
HASH_CHARS = 32


def fingerprint(settings: Iterable[bytes], weight_files: Iterable[Path]) -> str:
    """Returns a hash of everything that decides a model's logits: its settings, and samples of its weights."""
    digest = hashlib.sha256()
    for each in settings:
        digest.update(each)
    for path in weight_files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        stride = max(SAMPLE_BYTES, size // NUM_SAMPLES)
        with path.open("rb") as file:
            for start in range(0, size, stride):
                file.seek(start)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:HASH_CHARS]


def vocab_hash(folder: Path) -> str:
    """Returns a hash of the map from tokens to ids; models with equal hashes can exchange token ids.

    Raises:
        ConfigError: tokenizer.json is missing, or not in the format of the `tokenizers` library.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json: save one with "
            "AutoTokenizer.from_pretrained(<original>).save_pretrained(<folder>), a fast tokenizer is needed"
        )
    content = read_object(path)
    vocab = (content.get("model") or {}).get("vocab")
    if isinstance(vocab, list):
        vocab = {entry[0]: token_id for token_id, entry in enumerate(vocab)}
    if not isinstance(vocab, dict):
        raise ConfigError(f"{path} has no model.vocab: it was not written by the tokenizers library")
    tokens = {int(token_id): str(token) for token, token_id in vocab.items()}
    tokens.update({int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or []})
    digest = hashlib.sha256(json.dumps(sorted(tokens.items()), ensure_ascii=True).encode("ascii"))
    return digest.hexdigest()[:32]


def eos_token_ids(folder: Path, found: object) -> tuple[int, ...]:
    """Returns the tokens that end a text: those of generation_config.json, or otherwise `found` from config.json.

    Raises:
        ConfigError: The value is neither a token id nor a list of them.
    """
    source, path = folder / "config.json", folder / "generation_config.json"
    if path.is_file():
        generation = read_object(path)
        if generation.get("eos_token_id") is not None:
            found, source = generation["eos_token_id"], path
    token_ids = () if found is None else tuple(found) if isinstance(found, list | tuple) else (found,)
    for token_id in token_ids:
        if type(token_id) is not int or token_id < 0:
            raise ConfigError(f"{source}: eos_token_id must be a token id or a list of them, got {found!r}")
    return token_ids
