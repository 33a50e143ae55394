"""The Llama family in torch operations: batches that fit a bucket run as steps of static shape, larger ones in groups.

On CUDA, steps of static shape are recorded as graphs.
"""

from __future__ import annotations

from functools import partial

import torch
from typing_extensions import override

from paceline.engine.backends.interface import Layers, LlamaBackend, Platform
from paceline.engine.backends.torch.attention import plan_attention, run_attention
from paceline.engine.backends.torch.graphs import Capture, GraphCache
from paceline.engine.backends.torch.kv import TorchKVCache
from paceline.engine.backends.torch.layers import TorchLayers, TorchRows
from paceline.engine.backends.torch.static_batch import bucket_rows, plan_static
from paceline.engine.backends.torch.static_step import StaticStep, default_capture
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.hidden_states import StateLayout
from paceline.engine.kv import KVCache
from paceline.engine.llama import LlamaWeights


class TorchBackend(LlamaBackend):
    """The Llama family in torch operations.

    Args:
        platform: As in `LlamaBackend`, and so the next three.
        shape: More of them.
        static: Whether to pad batches to static shapes; by default on CUDA, where weights may be recorded.
        capture: How static steps are recorded; by default as CUDA graphs on CUDA, and not at all elsewhere.
    """

    def __init__(
        self,
        platform: Platform,
        config: DecoderConfig,
        shape: LlamaShape,
        weights: LlamaWeights,
        *,
        static: bool | None = None,
        capture: Capture | None = None,
    ) -> None:
        super().__init__(platform, config, shape, weights)
        self._layers = TorchLayers(config, shape, weights)
        self._static = weights.recordable and platform.device.type == "cuda" if static is None else static
        self._capture = capture
        self._step: StaticStep | None = None

    @property
    def graphs(self) -> GraphCache | None:
        """Recorded steps over the cache used last; None without any."""
        return None if self._step is None else self._step.graphs

    @override
    def rows_computed(self, rows: int) -> int:
        return bucket_rows(rows) if self._static else rows

    @override
    def forward(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        assert isinstance(cache, TorchKVCache), "a cache that new_cache made"
        plan = plan_static(batch) if self._static else None
        if plan is not None:
            return self._static_step(cache).run(plan, batch, kept, layers)
        return self._forward_grouped(batch, cache, kept, layers)

    def _forward_grouped(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers) -> torch.Tensor:
        device = self.platform.device
        fields = (batch.token_ids, batch.positions, batch.slots, batch.logit_rows)
        token_ids, positions, slots, wanted = (torch.from_numpy(field).to(device) for field in fields)
        features = None if batch.features is None else torch.from_numpy(batch.features).to(device)
        rows = TorchRows(token_ids=token_ids, positions=positions, slots=slots, logit_rows=wanted, features=features)
        attend = partial(run_attention, plan_attention(batch, device), scale=self._scale)
        return self._layers.forward(rows, cache, attend, kept, layers)

    def _static_step(self, cache: TorchKVCache) -> StaticStep:
        """Graphs belong to one cache: those of another one go when it is used for the first time."""
        if self._step is None or self._step.cache is not cache:
            self._capture = self._capture or default_capture(self.platform.device)
            self._step = StaticStep(self.config, self._layers, cache, self._capture)
        return self._step
