"""What engines need of a model: KV for its rows, and the logits of packed rows.

A `Decoder` is one; so is a simulated device, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.core.features import Features
from paceline.engine.batch import Batch


class Cache(Protocol):
    """KV, and whatever else is kept beside it, by physical slot; see `paceline.engine.kv.KVCache`."""

    def apply_moves(self, moves: list[tuple[int, int]]) -> None:
        """Copies slots, by pairs of source and target, and clears the list."""
        ...

    def features(self, slots: Sequence[int]) -> Features:
        """The hidden states of slots, float32 [n, width]."""
        ...

    def state_bytes(self, slots: Sequence[int], width: int) -> bytes:
        """The first `width` numbers of the hidden states of slots, bfloat16, little-endian, a slot after another."""
        ...


class Model(Protocol):
    """A model that computes steps; see `paceline.engine.decoder.Decoder`."""

    @property
    def feature_width(self) -> int:
        """Of the features that its rows take beside tokens; 0: none."""
        ...

    @property
    def state_width(self) -> int:
        """Numbers of the hidden states that drafters get; 0: none are kept."""
        ...

    def new_cache(self, num_blocks: int) -> Any:
        """An empty `Cache` of `num_blocks` blocks."""
        ...

    def logits(self, batch: Batch, cache: Any) -> npt.NDArray[np.float32]:
        """Computes a step; returns logits [k, vocab] of `batch.logit_rows`, in that order."""
        ...

    def rows_computed(self, rows: int) -> int:
        """Rows that a step of `rows` rows computes."""
        ...
