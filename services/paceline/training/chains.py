"""What drafters of every kind look like to training and evaluation: chains of guesses at every place.

A chain's guesses after the first count only where all before them were the target's tokens. So a
chain along a text may be fed that text, and all chains of a text come out of a few passes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from paceline.training.models import head_weight
from paceline.training.rollout import hidden_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """The guesses of all chains of a text at one position of theirs.

    At position `s` (0-based) of chains along a text of `n` tokens there are `n - 1 - s` places; place
    `i` guesses token `i + 2 + s` and knows tokens up to `i + 1 + s`, and the target's states up to `i`.

    Attributes:
        states: `[rows, places, draft hidden]`; times the head, logits.
        head: `[ids, draft hidden]`.
    """

    states: torch.Tensor
    head: torch.Tensor


class ChainDrafter(Protocol):
    """A drafter that can be asked for chains along a text."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers of the target whose outputs it wants."""

    @property
    def draft_ids(self) -> torch.Tensor | None:
        """Token ids of its logits, ascending; None where they are all ids of the vocabulary."""

    def chain(self, ids: torch.Tensor, states: torch.Tensor, positions: int) -> list[Drafted]:
        """Guesses along a text, a position each.

        Args:
            ids: the text, `[rows, n]`.
            states: the target's, with `taps`, as `rollout.hidden_states` gives them.
            positions: guesses of a chain; a drafter may know fewer.
        """


class ModelChain:
    """A draft model, which reads tokens alone."""

    taps: tuple[int, ...] = ()
    draft_ids: torch.Tensor | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def chain(self, ids: torch.Tensor, states: torch.Tensor, positions: int) -> list[Drafted]:
        """As `ChainDrafter.chain`: its state at a place is the same in every chain."""
        own, head = hidden_states(self._model, ids), head_weight(self._model)
        return [Drafted(states=own[:, 1 + position :], head=head) for position in range(positions)]
