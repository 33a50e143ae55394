"""Reading JSON objects: files of checkpoint folders, and values of flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.checkpoints.config_fields import TOKENIZER
from paceline.core.errors import ConfigError

# Newer checkpoints list all added tokens in their settings, and then the older file does not count.
LISTED_TOKENS, SPECIAL_TOKENS_FILE = "added_tokens_decoder", "special_tokens_map.json"
EXTRA_TOKENS, OLD_EXTRA_TOKENS = "extra_special_tokens", "additional_special_tokens"


def read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file.

    Raises:
        ConfigError: It is missing, broken, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def parse_object(flag: str, text: str) -> dict[str, Any]:
    """Returns the JSON object in the value of a flag.

    Raises:
        ConfigError: It is broken, or not an object; names the flag.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{flag} must be a JSON object: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {type(content).__name__}")
    return content


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns tokenizer_config.json, with the special tokens of an older folder.

    Raises:
        ConfigError: A file cannot be read.
    """
    settings, older = (
        read_object(path) if path.is_file() else {} for path in (folder / TOKENIZER, folder / SPECIAL_TOKENS_FILE)
    )
    if OLD_EXTRA_TOKENS in settings and not settings.get(EXTRA_TOKENS):
        settings[EXTRA_TOKENS] = settings.pop(OLD_EXTRA_TOKENS)
    return settings if LISTED_TOKENS in settings else {**settings, **older}
