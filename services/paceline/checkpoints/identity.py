"""Checkpoint identity: fingerprint of the weights, vocabulary, and the tokens that end a text."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path

from paceline.checkpoints.json_files import (
    CONFIG,
    GENERATION,
    MOST_LENGTH,
    TOKENIZER,
    read_object,
    shown,
    tokenizer_settings,
    whole,
)
from paceline.core.errors import ConfigError

logger = logging.getLogger(__name__)

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
    tokens = _tokens(path)
    digest = hashlib.sha256(json.dumps(sorted(tokens.items()), ensure_ascii=True).encode("ascii"))
    return digest.hexdigest()[:32]


def _tokens(path: Path) -> dict[int, str]:
    """The tokens of a tokenizer.json by their ids.

    Raises:
        ConfigError: It was not written by the tokenizers library.
    """
    content = read_object(path)
    try:
        vocab = content["model"]["vocab"]
        entries = ((entry[0], token_id) for token_id, entry in enumerate(vocab)) if isinstance(vocab, list) else None
        tokens = {int(token_id): str(token) for token, token_id in entries or vocab.items()}
        tokens.update({int(token["id"]): str(token["content"]) for token in content.get("added_tokens") or []})
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} has no model.vocab: it was not written by the tokenizers library ({error!r})"
        ) from error
    return tokens


def eos_token_ids(folder: Path, found: object, vocab_size: int) -> tuple[int, ...]:
    """Reads the tokens that end a text, as vLLM does.

    They are those of generation_config.json, or otherwise `found` from config.json, and the tokenizer's own end token:
    files of chat models may name the base model's only.

    Returns:
        Ids within the vocabulary, in order; a warning names the others, which are ignored.

    Raises:
        ConfigError: A value has another type; names file, field and value.
    """
    source, path = folder / CONFIG, folder / GENERATION
    if path.is_file():
        generation = read_object(path)
        if generation.get("eos_token_id") is not None:
            found, source = generation["eos_token_id"], path
    given = found if isinstance(found, list | tuple) else [] if found is None else [found]
    named = [whole(each, f"{source}: each of eos_token_id", 0, MOST_LENGTH) for each in given]
    unique = dict.fromkeys((*named, *_tokenizers_own(folder)))
    if ignored := [token_id for token_id in unique if token_id >= vocab_size]:
        _warn(f"eos_token_id: {ignored} are ignored, since the vocabulary has {vocab_size} ids ({folder})")
    return tuple(token_id for token_id in unique if token_id < vocab_size)


@functools.cache
def _warn(line: str) -> None:
    """Once, however often a service reads its checkpoint."""
    logger.warning(line)


def _tokenizers_own(folder: Path) -> tuple[int, ...]:
    tokenizer = folder / "tokenizer.json"
    given = tokenizer_settings(folder).get("eos_token")
    spelled = given.get("content") if isinstance(given, dict) else given
    if not isinstance(spelled, str) and given is not None:
        raise ConfigError(f"{folder / TOKENIZER}: eos_token must be text or an object with content, got {shown(given)}")
    if spelled is None or not tokenizer.is_file():
        return ()
    # A base install needs no tokenizers.
    from paceline.checkpoints.tokenizer import read_tokenizer

    token_id = read_tokenizer(folder).token_to_id(spelled)
    return () if token_id is None else (token_id,)
