"""The layers of the Llama family in torch operations, for CUDA and to check the compiled loops.

Every operation has a shape that follows from the shapes of the inputs, reads no tensor on the host and copies
none to the device, so that a CUDA graph can replay it. How rows find their context is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.interface import Layers
from paceline.engine.backends.torch.attention import write_at
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.hidden_states import StateLayout
from paceline.engine.kv import KVCache
from paceline.engine.linear import Linear
from paceline.engine.llama import LlamaLayer, LlamaWeights

# (query [rows, H, D], keys and values of one layer) -> [rows, H, D], in the kind of query or cache.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchRows:
    """Rows of a step on the device, as in `Batch`: int64 [rows] each, logit_rows int64 [k], features if any."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    features: torch.Tensor | None = None


class TorchLayers:
    """Rows in, logits out; the residual stream is float32, what lies between linears is in their kind.

    Args:
        shape: More of them.
        weights: On the device of the rows.
    """

    def __init__(self, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> None:
        self._config = config
        self._eps: Final = shape.rms_norm_eps
        self._weights = weights
        self._rope_scaling = shape.rope.attention_scaling
        self._inverse = torch.tensor(shape.rope.inverse, dtype=torch.float32, device=weights.embedding.device)
        self._head_norms = [self._stack_head_norms(layer) for layer in weights.layers]

    def _stack_head_norms(self, layer: LlamaLayer) -> torch.Tensor | None:
        """Weights [H + G, D] of the norms of queries and keys."""
        if not len(layer.query_norm):
            return None
        config = self._config
        parts = (layer.query_norm.expand(config.num_heads, -1), layer.key_norm.expand(config.num_kv_heads, -1))
        return torch.cat(parts)

    def forward(
        self, rows: TorchRows, cache: KVCache, attend: Attend, kept: StateLayout, layers: Layers = None
    ) -> torch.Tensor:
        """Writes the rows' KV and states; returns float32 logits [k, vocab]."""
        rope = self._rope(rows.positions)
        place = (rows.slots // BLOCK_SIZE, rows.slots % BLOCK_SIZE)
        residual, entering = self._enter(rows)
        tapped: dict[int, torch.Tensor] = {}
        for index in range(len(self._weights.layers)) if layers is None else layers:
            tapped[index] = residual
            layer = self._weights.layers[index]
            keys, values = cache.keys[index], cache.values[index]
            qkv = _project(layer.qkv, self._norm(residual, layer.input_norm) if entering is None else entering)
            entering = None
            rotated, value = self._rotate(qkv, self._head_norms[index], rope)
            query, key = rotated.split([self._config.num_heads, self._config.num_kv_heads], dim=1)
            write_at(keys, values, place, key, value)
            residual = residual + _project(layer.out, attend(query, keys, values).flatten(1))
            gate, up = _project(layer.gate_up, self._norm(residual, layer.post_norm)).chunk(2, dim=-1)
            residual = residual + _project(layer.down, functional.silu(gate) * up)
        if not kept.width:
            return self._weights.head(self._norm(residual[rows.logit_rows], self._weights.final_norm))
        tapped[len(self._weights.layers)] = residual
        final = self._norm(residual, self._weights.final_norm)
        cache.keep_states(rows.slots, kept.states(tapped, final))
        return self._weights.head(final[rows.logit_rows])

    def _enter(self, rows: TorchRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The residual stream [rows, hidden] before the first layer, and what that layer takes if not its norm."""
        embedded, features = (
            functional.embedding(rows.token_ids, self._weights.embedding).float(),
            self._weights.features,
        )
        if features is None:
            return embedded, None
        assert rows.features is not None, "such a model takes features"
        normed = self._norm(rows.features, features.norm)
        entering = torch.cat([self._norm(embedded, self._weights.layers[0].input_norm), normed], dim=-1)
        return (normed if features.normed_residual else rows.features), entering

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows, (rows.shape[-1],), weight, self._eps)

    def _rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors [rows, 1, D] of a head and of the head with its halves swapped."""
        angles = positions[:, None, None].float() * self._inverse
        cos, sin = angles.cos() * self._rope_scaling, angles.sin() * self._rope_scaling
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _rotate(
        self, qkv: torch.Tensor, norms: torch.Tensor | None, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of qkv [rows, (H + 2G) D]: queries and keys, float32 [rows, H + G, D], and values [rows, G, D]."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        turned, value = heads.split([config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1)
        if norms is not None:
            turned = functional.rms_norm(turned.float(), (config.head_dim,), None, self._eps) * norms
        cos, sin = rope
        return turned * cos + turned.roll(config.head_dim // 2, dims=-1) * sin, value


def _project(linear: Linear, rows: torch.Tensor) -> torch.Tensor:
    """[rows, in] -> [rows, out] in the linear's kind."""
    return linear.raw(rows.to(linear.dtype))
