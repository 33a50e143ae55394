"""What a checkpoint folder of draft heads says of itself; needs nothing but the standard library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import ConfigError

EAGLE3_ARCHITECTURE: Final = "LlamaForCausalLMEagle3"
SPECULATORS_TYPE: Final = "eagle3"


def described(folder: Path) -> dict[str, Any]:
    """Reads config.json.

    Raises:
        ConfigError: It is missing, or no JSON object.
    """
    path = folder / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def is_eagle3(folder: Path) -> bool:
    """Whether a checkpoint folder holds an EAGLE-3 head, in SafeAILab's layout or that of speculators."""
    return (folder / "config.json").is_file() and describes_eagle3(described(folder))


def describes_eagle3(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    return EAGLE3_ARCHITECTURE in (config.get("architectures") or []) or (
        config.get("speculators_model_type") == SPECULATORS_TYPE
    )
