"""The Llama family in compiled loops around packed linears: each row's bits are independent of the other rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from paceline.engine.backends.cpu.attention import attend_rows
from paceline.engine.backends.cpu.fused_layers import FusedLayers
from paceline.engine.backends.cpu.kv import CpuKVCache, as_array
from paceline.engine.backends.cpu.layer_kernels import add_rms_norm_rows, project_rows, rms_norm_rows, silu_mul_rows
from paceline.engine.backends.cpu.linear import row_counts, rows_computed
from paceline.engine.backends.interface import Layers, LlamaBackend, Platform
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.hidden_states import StateLayout
from paceline.engine.kv import KVCache
from paceline.engine.layers import LlamaLayer, LlamaWeights, RopeTable

Rows = npt.NDArray[Any]


class _CompiledLayer:
    """A layer with its norms as arrays."""

    __slots__ = ("down", "gate_up", "input_norm", "key_norm", "out", "post_norm", "qkv", "query_norm")

    def __init__(self, layer: LlamaLayer) -> None:
        self.qkv, self.out = layer.qkv.raw, layer.out.raw
        self.gate_up, self.down = layer.gate_up.raw, layer.down.raw
        self.input_norm, self.post_norm = layer.input_norm.numpy(), layer.post_norm.numpy()
        self.query_norm, self.key_norm = layer.query_norm.numpy(), layer.key_norm.numpy()


class CpuBackend(LlamaBackend):
    """The Llama family in compiled loops; arguments as `LlamaBackend`."""

    def __init__(self, platform: Platform, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> None:
        super().__init__(platform, config, shape, weights)
        self._inner = shape.intermediate_size
        self._eps = np.float32(shape.rms_norm_eps)
        self._rope = RopeTable(shape.rope)
        self._layers = [_CompiledLayer(layer) for layer in weights.layers]
        self._fused: FusedLayers | None = None
        if FusedLayers.are_possible(weights.layers, shape.hidden_size):
            self._fused = FusedLayers(weights.layers, self._inner, self._eps, np.float32(self._scale))

    def prepare(self, max_rows: int, cache: KVCache, kept: StateLayout, *, drafts: bool) -> None:
        """Compiles the packed linears of steps of up to so many rows; layers of one shape share them."""
        for count in row_counts(max_rows, self.dtype):
            for linear in self.weights.layers[0].linears:
                linear.raw(torch.zeros(count, linear.in_features, dtype=linear.dtype))

    @override
    def forward(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        assert isinstance(cache, CpuKVCache), "a cache that new_cache made"
        residual, entering = self._enter(batch)
        wanted = range(len(self._layers)) if layers is None else layers
        if self._fused is None:
            delta, tapped = self._run_one_by_one(wanted, batch, cache, residual, entering, kept)
        else:
            taps, rope = [index for index in wanted if index in kept.taps], self._rope.rows(batch.positions)
            delta, tapped = self._fused.run(wanted, residual, taps, rope, batch, cache, self.config.num_heads)
        if not kept.width:
            return self.head(self._final(residual[batch.logit_rows], delta[batch.logit_rows]))
        final = self._final(residual, delta[: batch.num_rows])
        tapped[len(self._layers)] = torch.from_numpy(residual)
        cache.keep_states(torch.from_numpy(batch.slots), kept.states(tapped, final))
        return self.head(final[torch.from_numpy(batch.logit_rows)])

    def _enter(self, batch: Batch) -> tuple[Rows, torch.Tensor | None]:
        """The residual stream [rows, hidden] before the first layer, and what that layer takes if not its norm."""
        token_ids, features = torch.from_numpy(batch.token_ids), self.weights.features
        embedded: Rows = torch.nn.functional.embedding(token_ids, self.weights.embedding).float().numpy()
        if features is None:
            return embedded, None
        assert batch.features is not None, "such a model takes features"
        hidden = self.hidden_size
        entering, entering_rows = self._rows_buffer(batch.num_rows, 2 * hidden)
        rms_norm_rows(embedded, self._layers[0].input_norm, self._eps, entering_rows[:, :hidden])
        rms_norm_rows(batch.features, features.norm.numpy(), self._eps, entering_rows[:, hidden:])
        if not features.normed_residual:
            return batch.features.copy(), entering
        residual = np.empty_like(batch.features)
        rms_norm_rows(batch.features, features.norm.numpy(), self._eps, residual)
        return residual, entering

    def _rows_buffer(self, rows: int, width: int) -> tuple[torch.Tensor, Rows]:
        """Input of a packed linear, padded, and the array of its real rows."""
        tensor = torch.zeros((rows_computed(rows, self.dtype), width), dtype=self.dtype)
        return tensor, as_array(tensor)[:rows]

    def _run_one_by_one(
        self,
        wanted: Sequence[int],
        batch: Batch,
        cache: CpuKVCache,
        residual: Rows,
        entering: torch.Tensor | None,
        kept: StateLayout,
    ) -> tuple[Rows, dict[int, torch.Tensor]]:
        """Runs layers; returns what is still to be added to the residual stream, and that before the tapped ones."""
        config, rows, eps = self.config, batch.num_rows, self._eps
        scale, arrays = np.float32(self._scale), batch.attention_arrays
        cos, sin = self._rope.rows(batch.positions)
        query = np.empty((rows, config.num_heads, config.head_dim), dtype=np.float32)
        normed, normed_rows = self._rows_buffer(rows, residual.shape[1])
        attended, attended_rows = self._rows_buffer(rows, config.num_heads * config.head_dim)
        activated, activated_rows = self._rows_buffer(rows, self._inner)
        tapped: dict[int, torch.Tensor] = {}
        delta = None
        for index in wanted:
            layer, (keys, values) = self._layers[index], cache.layers[index]
            if delta is not None:
                add_rms_norm_rows(residual, delta, layer.input_norm, eps, normed_rows)
                entering = normed
            elif entering is None:
                rms_norm_rows(residual, layer.input_norm, eps, normed_rows)
                entering = normed
            if index in kept.taps:
                tapped[index] = torch.from_numpy(residual.copy())
            qkv = as_array(layer.qkv(entering))
            norms = (layer.query_norm, layer.key_norm)
            project_rows(qkv, *norms, eps, cos, sin, batch.slots, keys, values, query)
            attend_rows(query, keys, values, arrays, scale, attended_rows)
            add_rms_norm_rows(residual, as_array(layer.out(attended)), layer.post_norm, eps, normed_rows)
            silu_mul_rows(as_array(layer.gate_up(normed)), activated_rows)
            delta = as_array(layer.down(activated))
        assert delta is not None, "at least one layer runs"
        return delta, tapped

    def _final(self, residual: Rows, delta: Rows) -> torch.Tensor:
        """Final hidden states of rows, float32 [rows, hidden]."""
        final = np.empty_like(residual)
        add_rms_norm_rows(residual, delta, self.weights.final_norm.numpy(), self._eps, final)
        return torch.from_numpy(final)
