"""Loads a drafter of any kind: a draft model, Medusa heads or an EAGLE-3 head, by its config.json."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from paceline.training import eagle3, medusa
from paceline.training.chains import ChainDrafter, ModelChain
from paceline.training.models import load_model


def load_drafter(folder: Path, target: PreTrainedModel) -> ChainDrafter:
    """The drafter of a folder, float32, for this target.

    Raises:
        FileNotFoundError: the folder lacks config.json or weights.
        ValueError: it was made for a target of another vocabulary or shape.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no config.json")
    architectures = json.loads(path.read_text(encoding="utf-8")).get("architectures", [])
    if medusa.ARCHITECTURE in architectures:
        return medusa.load_medusa(folder, target)
    if eagle3.ARCHITECTURE in architectures:
        return eagle3.load_eagle3(folder, target)
    model = load_model(folder)
    sizes = (target.config.vocab_size, model.config.vocab_size)
    if sizes[0] != sizes[1]:
        raise ValueError(f"vocabulary of the target is {sizes[0]}, of the drafter {sizes[1]}")
    return ModelChain(model)
