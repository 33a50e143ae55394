"""Reading JSON objects: files of checkpoint folders, and values of flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError


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
