"""Decoders: a batch of rows in, answers about their logits out.

A decoder knows nothing of sessions, trees or sampling: rows, slots and block tables are all it sees. How and where rows
are computed is its back end's affair.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.backends.interface import Backend, Layers, memory_errors
from paceline.engine.batch import Batch
from paceline.engine.hidden_states import NO_STATES, StateLayout
from paceline.engine.kv import KVCache
from paceline.engine.model import Burst, Drafted, Pending
from paceline.engine.pending import Ranks, VerifyRequest


class Decoder:
    """A causal language model over paged KV.

    Args:
        backend: The backend that runs its steps.

    Attributes:
        states: States that steps keep per row, beside its KV.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend, self.platform, self.config = backend, backend.platform, backend.config
        self.device, self.dtype, self.hidden_size = backend.platform.device, backend.dtype, backend.hidden_size
        self.head, self.feature_width = backend.head, backend.feature_width
        self.states = NO_STATES

    @property
    def weight_bytes(self) -> int:
        """Weight bytes that a step reads."""
        return self.backend.weight_bytes + self.states.nbytes

    @property
    def state_width(self) -> int:
        """Numbers of the hidden states that drafters get."""
        return self.states.fused_width

    def share(self, layers: Sequence[int]) -> float:
        """Share of a step's weight reads that a pass through some layers and the head takes."""
        per_layer = self.backend.layer_bytes
        read = self.backend.weight_bytes - sum(per_layer) + sum(per_layer[index] for index in layers)
        return read / self.weight_bytes

    def keep_states(self, layout: StateLayout) -> None:
        """From now on caches have room for such states, and steps write them; none unless this is called."""
        self.backend.check_states(layout)
        self.states = layout

    def new_cache(self, num_blocks: int) -> KVCache:
        """An empty cache of `num_blocks` blocks."""
        return self.backend.new_cache(num_blocks, self.states.width)

    @torch.inference_mode()
    def prepare(self, max_rows: int, cache: KVCache, *, drafts: bool = False) -> None:
        """Makes at once what steps of up to `max_rows` rows over a cache need, and bursts where it drafts."""
        self.backend.prepare(max_rows, cache, self.states, drafts=drafts)

    @memory_errors()
    @torch.inference_mode()
    def launch(self, batch: Batch, cache: KVCache, wanted: VerifyRequest | Ranks | None) -> Pending:
        """Starts a step; see `paceline.engine.model.Model`."""
        return self.backend.launch(batch, cache, self.states, wanted)

    @memory_errors()
    @torch.inference_mode()
    def draft(self, batch: Batch, cache: KVCache, burst: Burst) -> Drafted:
        """Runs a burst; see `paceline.engine.model.Model`."""
        return self.backend.draft(batch, cache, self.states, burst)

    @memory_errors()
    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache, layers: Layers = None) -> torch.Tensor:
        """Writes the rows' KV and states, and returns float32 logits [k, vocab] of `batch.logit_rows`, in that order.

        Args:
            layers: Runs these layers alone, in this order, and keeps no states; None runs all.
        """
        return self.backend.forward(batch, cache, self.states if layers is None else NO_STATES, layers)
