"""The model interface of the engines: KV for its rows, and answers about packed rows.

A `Decoder` is one; so is a simulated device, which needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from paceline.core.features import Features
from paceline.engine.batch import Batch
from paceline.engine.pending import Longs, Rankings, Ranks, VerifyRequest, VerifyResult
from paceline.engine.sampler import Logits
from paceline.forest import Floats, Ints


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


class Pending(Protocol):
    """A launched step; a caller that asks for results waits until it is over. Rows are those of its `Batch.logit_rows`.

    All raise MemoryError where the device has no room, as `Model.launch` does.
    """

    @property
    def runs_ahead(self) -> bool:
        """Whether the next step may be launched before this one is read; see `Batch.above`."""
        ...

    def follow(self, walks: VerifyRequest) -> VerifyResult:
        """Follows the target's tokens down guesses of each session until it chooses one that was not guessed."""
        ...

    def rank(self, rows: Longs, positions: Longs, choices: np.ndarray) -> Rankings:
        """Ranks guesses as each session's sampler would; see `Ranks`."""
        ...

    def logits(self, rows: Sequence[int]) -> Logits:
        """Logits of some rows, float32 [n, vocab], in the memory of the host; the caller may change them."""
        ...


class Burst(NamedTuple):
    """Levels of guesses below some rows of a batch, each below the best of the level before.

    Attributes:
        ranks: The rows, and how sessions choose.
        kv: int32 `[levels - 1, rows]`, where KV of the best guess of each level but the last goes; NONE: the level is
            the row's last one.
        width: Guesses at each.
    """

    ranks: Ranks
    kv: Ints
    width: int


class Drafted(NamedTuple):
    """Results of a burst.

    Attributes:
        pending: The step of the batch itself, for rows that are not in the burst.
        token_ids: int32 `[levels, rows, width]`, best first; below 0: none.
        confidences: float64 `[levels, rows, width]`, how sure they are.
    """

    pending: Pending
    token_ids: Ints
    confidences: Floats


class Model(Protocol):
    """A model that computes steps; see `paceline.engine.decoder.Decoder`."""

    @property
    def feature_width(self) -> int:
        """Width of the features that its rows take beside tokens; 0: none."""
        ...

    @property
    def state_width(self) -> int:
        """Numbers of the hidden states that drafters get; 0: none are kept."""
        ...

    def new_cache(self, num_blocks: int) -> Any:
        """An empty `Cache` of `num_blocks` blocks."""
        ...

    def launch(self, batch: Batch, cache: Any, wanted: VerifyRequest | Ranks | None) -> Pending:
        """Starts a step, and returns at once where the device works by itself.

        Args:
            cache: The cache of `new_cache`; nobody else touches it before the step is over.
            wanted: Results asked for later, so that the device begins with them; None: not known.

        Raises:
            MemoryError: The device has no room for it; nothing of it counts.
        """
        ...


class DraftModel(Model, Protocol):
    """A model that drafts."""

    def draft(self, batch: Batch, cache: Any, burst: Burst) -> Drafted:
        """Computes a batch, and goes on from some of its rows by itself, a level after the other.

        Raises:
            MemoryError: As of `launch`.
        """
        ...
