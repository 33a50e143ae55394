"""JSON objects that strangers wrote: files of checkpoint folders and values of flags, and numbers in them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import ConfigError, shortened
from paceline.service.config import reason

MAX_VALUE_CHARS: Final = 80
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
# Sizes of matrices, lengths of texts, and token ids go up to these.
MOST_SIZE: Final = 2**24
MOST_LENGTH: Final = 2**31 - 1


def whole(value: Any, what: str, low: int = 1, high: int = MOST_SIZE) -> int:
    """Returns a value that is a whole number between two, inclusively.

    Raises:
        ConfigError: It is none; names `what` it is and its value.
    """
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{what} must be a whole number from {low:,} to {high:,}, got {shown(value)}")
    return value


def number(value: Any, what: str, low: float, high: float) -> float:
    """The same of any number."""
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise ConfigError(f"{what} must be a number from {low:g} to {high:g}, got {shown(value)}")
    return float(value)


def shown(value: Any) -> str:
    """A JSON value for a message, cut to a bound."""
    return shortened(json.dumps(value, ensure_ascii=True, default=repr), MAX_VALUE_CHARS)


CHAT_TEMPLATE: Final = "chat_template.jinja"
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
        raise ConfigError(f"{path} cannot be read: {reason(error, path)}") from error
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


def has_chat_template(folder: Path) -> bool:
    """Whether a checkpoint folder holds a chat template."""
    return (folder / CHAT_TEMPLATE).is_file() or bool(tokenizer_settings(folder).get("chat_template"))
