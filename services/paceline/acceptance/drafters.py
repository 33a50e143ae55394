"""Drafters of every kind, loaded by their config.json: draft models, Medusa heads and EAGLE-3 heads."""

import json
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from paceline.acceptance import eagle3, medusa
from paceline.acceptance.models import Drafted, head_weight, hidden_states, load_model


class ChainDrafter(Protocol):
    """A drafter that guesses chains along a text."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it reads."""

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Token ids of its logits, ascending; None if these are all ids of the vocabulary."""

    def chain(self, ids: torch.Tensor, states: torch.Tensor, positions: int) -> list[Drafted]:
        """Guesses along a text, one `Drafted` a position.

        Args:
            ids: The text, `[rows, n]`.
            states: The target's, with `taps`, as `hidden_states` returns them.
            positions: Guesses of a chain; a drafter may give fewer.
        """


class ModelChain:
    """A draft model, which reads tokens alone."""

    taps: tuple[int, ...] = ()
    draft_ids: torch.Tensor | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def chain(self, ids: torch.Tensor, states: torch.Tensor, positions: int) -> list[Drafted]:
        """Guesses along a text; the state at a place is the same in every chain."""
        own, head = hidden_states(self._model, ids), head_weight(self._model)
        return [Drafted(states=own[:, 1 + position :], head=head) for position in range(positions)]


def load_drafter(folder: Path, target: PreTrainedModel) -> ChainDrafter:
    """The drafter of a folder, float32, for this target.

    Raises:
        FileNotFoundError: The folder lacks config.json or weights.
        ValueError: It was made for a target of another vocabulary or shape.
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
