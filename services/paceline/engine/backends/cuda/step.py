"""The layers of the Llama family over one cache: ten kernels a layer, of which four are products by torch.

Nothing here reads a value on the host, and every shape follows from that of the step, so that a graph can replay it.
The residual stream is float32; what lies between linears is in their kind.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from paceline.engine.backends.cuda.attention import attend
from paceline.engine.backends.cuda.kv import CudaKVCache
from paceline.engine.backends.cuda.layer_kernels import add_norm, rope_store, silu_mul
from paceline.engine.backends.cuda.plan import PlanFields
from paceline.engine.backends.interface import Layers
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.hidden_states import StateLayout
from paceline.engine.layers import LlamaLayer, LlamaWeights


class CudaLayers:
    """Rows in, final hidden states out.

    Args:
        shape: More of them.
        weights: On the device of the rows.
    """

    def __init__(self, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> None:
        self._config, self._eps, self._weights = config, shape.rms_norm_eps, weights
        self._rope_scaling = shape.rope.attention_scaling
        self._inverse = torch.tensor(shape.rope.inverse, dtype=torch.float32, device=weights.embedding.device)
        self._head_norms = [self._stack_head_norms(layer) for layer in weights.layers]

    def _stack_head_norms(self, layer: LlamaLayer) -> torch.Tensor | None:
        """Weights [H + G, D] of the norms of queries and keys."""
        if not len(layer.query_norm):
            return None
        config = self._config
        return torch.cat(
            (layer.query_norm.expand(config.num_heads, -1), layer.key_norm.expand(config.num_kv_heads, -1))
        )

    def forward(
        self, rows: PlanFields, cache: CudaKVCache, kept: StateLayout, normed: torch.Tensor, layers: Layers = None
    ) -> None:
        """Writes the rows' KV and states, and their final hidden states [rows, hidden] into `normed`."""
        weights, config = self._weights, self._config
        residual, entering = self._enter(rows)
        angles = rows.positions[:, None].float() * self._inverse
        rope = (angles.cos() * self._rope_scaling, angles.sin() * self._rope_scaling)
        query = normed.new_empty((len(normed), config.num_heads, config.head_dim))
        tapped: dict[int, torch.Tensor] = {}
        delta: torch.Tensor | None = None
        for index in range(len(weights.layers)) if layers is None else layers:
            layer, (keys, values) = weights.layers[index], cache.layers[index]
            if entering is None:
                add_norm(residual, delta, layer.input_norm, self._eps, normed)
            if index in kept.taps:
                tapped[index] = residual.clone()
            qkv = layer.qkv.raw(normed if entering is None else entering)
            entering = None
            rope_store(qkv, *rope, rows.slots, self._head_norms[index], self._eps, query, keys, values)
            attended = attend(rows.lanes, query, keys, values, config.head_dim**-0.5)
            add_norm(residual, layer.out.raw(attended.flatten(1)), layer.post_norm, self._eps, normed)
            delta = layer.down.raw(silu_mul(layer.gate_up.raw(normed)))
        add_norm(residual, delta, weights.final_norm, self._eps, normed)
        if kept.width:
            tapped[len(weights.layers)] = residual
            cache.keep_states(rows.slots, kept.states(tapped, normed.float()))

    def _enter(self, rows: PlanFields) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream [rows, hidden] before the first layer, and what that layer takes if not its norm."""
        embedded = functional.embedding(rows.token_ids, self._weights.embedding).float()
        feature_norm, first = self._weights.feature_norm, self._weights.layers[0]
        if feature_norm is None:
            return embedded, None
        assert rows.features is not None, "such a model takes features"
        normed = functional.rms_norm(rows.features, rows.features.shape[-1:], feature_norm, self._eps)
        token = functional.rms_norm(embedded, embedded.shape[-1:], first.input_norm, self._eps)
        entering = torch.cat((token, normed), dim=-1).to(first.qkv.dtype)
        # The residual is added to in place: it must not be what came in.
        return rows.features.clone(), entering
