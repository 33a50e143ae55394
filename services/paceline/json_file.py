"""Reading JSON files of checkpoint folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: It is missing, broken, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content
