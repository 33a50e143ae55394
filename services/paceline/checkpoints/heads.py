"""What a checkpoint folder of draft heads says of itself; needs nothing but the standard library."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from paceline.checkpoints.json_file import read_object

EAGLE3_ARCHITECTURE: Final = "LlamaForCausalLMEagle3"
SPECULATORS_TYPE: Final = "eagle3"


def is_eagle3(folder: Path) -> bool:
    """Whether a checkpoint folder holds an EAGLE-3 head, in SafeAILab's layout or that of speculators."""
    return (folder / "config.json").is_file() and describes_eagle3(read_object(folder / "config.json"))


def describes_eagle3(config: dict[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 head."""
    return EAGLE3_ARCHITECTURE in (config.get("architectures") or []) or (
        config.get("speculators_model_type") == SPECULATORS_TYPE
    )
