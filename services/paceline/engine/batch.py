"""The rows of one forward pass: what the engine loop packs and every decoder reads. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one step, in any order; all arrays are C-contiguous, and of these kinds alone: others compile loops anew.

    A row attends the first `context_lens` positions of its sequence's blocks, then `num_ancestors` slots of
    `ancestors` in order. A row that is not a tree node writes its KV into its block and counts itself in
    `context_lens`; a tree node writes into a scratch slot and is the last of its own ancestors.

    Attributes:
        token_ids: int64 [rows].
        positions: int64 [rows], absolute positions (RoPE).
        slots: int64 [rows], distinct, where the KV of each row is written: block * BLOCK_SIZE + offset.
        sequences: int32 [rows], rows of `block_tables`.
        context_lens: int32 [rows].
        ancestors: int32 [rows, depth], physical slots; entries from `num_ancestors` on are arbitrary.
        num_ancestors: int32 [rows], 0 for rows that are not tree nodes.
        block_tables: int32 [sequences, blocks].
        logit_rows: int64 [k], the rows whose logits are wanted, in the order wanted.
        features: float32 [rows, width], for decoders that take hidden states beside tokens; None for others.
        above: A step without guesses that nobody has read yet, of a device that runs ahead: `token_ids` are places
            in its `VerifyRequest`, and the rows' tokens those that it chooses there. None: tokens are known.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    ancestors: npt.NDArray[np.int32]
    num_ancestors: npt.NDArray[np.int32]
    block_tables: npt.NDArray[np.int32]
    logit_rows: npt.NDArray[np.int64]
    features: npt.NDArray[np.float32] | None = None
    above: object | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def attention_arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Arrays that attention needs: sequences, context_lens, ancestors, num_ancestors, block_tables."""
        return self.sequences, self.context_lens, self.ancestors, self.num_ancestors, self.block_tables
