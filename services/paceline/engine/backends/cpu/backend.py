"""The Llama family in compiled loops around packed linears: each row's bits are independent of the other rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from paceline.engine.backends.cpu.fused_layers import FusedLayers
from paceline.engine.backends.cpu.kv import CpuKVCache
from paceline.engine.backends.cpu.layer_kernels import add_rms_norm_rows, rms_norm_rows
from paceline.engine.backends.cpu.linear import PackedHead
from paceline.engine.backends.interface import Layers, LlamaBackend, Platform
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.hidden_states import StateLayout
from paceline.engine.kv import KVCache
from paceline.engine.layers import LlamaWeights, RopeTable

Rows = npt.NDArray[Any]


class CpuBackend(LlamaBackend):
    """The Llama family in compiled loops; arguments as `LlamaBackend`."""

    def __init__(self, platform: Platform, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> None:
        # A tied embedding is read from the packed head: it is a fifth of Llama-3.2-1B.
        self._tied = weights.head if isinstance(weights.head, PackedHead) else None
        if self._tied is not None and self._tied.packs(weights.embedding):
            weights = replace(weights, embedding=weights.embedding[:0].clone())
        else:
            self._tied = None
        super().__init__(platform, config, shape, weights)
        self._inner = shape.intermediate_size
        self._eps = np.float32(shape.rms_norm_eps)
        self._rope = RopeTable(shape.rope)
        self._layers = FusedLayers(weights.layers, self._inner, self._eps, np.float32(self._scale))
        self._nothing = np.empty((0, 0), np.uint16 if self.dtype == torch.bfloat16 else np.float32)

    @override
    def forward(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        assert isinstance(cache, CpuKVCache), "a cache that new_cache made"
        residual, entering = self._enter(batch)
        num_layers = self.config.num_layers
        wanted = range(num_layers) if layers is None else layers
        taps, rope = [index for index in wanted if index in kept.taps], self._rope.rows(batch.positions)
        delta, tapped = self._layers.run(wanted, residual, entering, taps, rope, batch, cache, self.config.num_heads)
        if not kept.width:
            return self.head(self._final(residual[batch.logit_rows], delta[batch.logit_rows]))
        final = self._final(residual, delta)
        tapped[num_layers] = torch.from_numpy(residual)
        cache.keep_states(torch.from_numpy(batch.slots), kept.states(tapped, final))
        return self.head(final[torch.from_numpy(batch.logit_rows)])

    def _enter(self, batch: Batch) -> tuple[Rows, Rows]:
        """The residual stream [rows, hidden] before the first layer, and what that layer takes; no rows: its norm."""
        embedded, feature_norm = self._embed(batch.token_ids), self.weights.feature_norm
        if feature_norm is None:
            return embedded, self._nothing
        assert batch.features is not None, "such a model takes features"
        hidden = self.hidden_size
        entering = np.empty((batch.num_rows, 2 * hidden), self._nothing.dtype)
        rms_norm_rows(embedded, self.weights.layers[0].input_norm.numpy(), self._eps, entering[:, :hidden])
        rms_norm_rows(batch.features, feature_norm.numpy(), self._eps, entering[:, hidden:])
        return batch.features.copy(), entering

    def _embed(self, token_ids: npt.NDArray[np.int64]) -> Rows:
        """Embeddings, float32 [tokens, hidden]."""
        if self._tied is not None:
            return self._tied.rows_of(token_ids)
        embedded: Rows = (
            torch.nn.functional.embedding(torch.from_numpy(token_ids), self.weights.embedding).float().numpy()
        )
        return embedded

    def _final(self, residual: Rows, delta: Rows) -> torch.Tensor:
        """Final hidden states of rows, float32 [rows, hidden]."""
        final = np.empty_like(residual)
        add_rms_norm_rows(residual, delta, self.weights.final_norm.numpy(), self._eps, final)
        return torch.from_numpy(final)
