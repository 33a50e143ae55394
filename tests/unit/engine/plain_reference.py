"""The Llama family as plainly as torch says it, row by row: what compiled loops and kernels are checked against."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch.nn import functional
from typing_extensions import override

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.interface import Attention, Layers, LlamaBackend, Platform
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.hidden_states import StateLayout
from paceline.engine.kv import KVCache
from paceline.engine.layers import Head, Linear, LlamaLayer, LlamaWeights


def attend(
    batch: Batch,
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """An `Attention` once the batch is bound: each row over its context, then its ancestors."""
    slots, group = torch.from_numpy(batch.slots), query.shape[1] // keys.shape[1]
    keys[slots // BLOCK_SIZE, :, :, slots % BLOCK_SIZE] = new_keys.to(keys.dtype)
    values[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = new_values.to(values.dtype)
    out = torch.empty_like(query)
    for row, context in enumerate(batch.context_lens):
        positions = np.arange(context)
        table = batch.block_tables[batch.sequences[row]].astype(np.int64)
        places = table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        attended = torch.from_numpy(np.append(places, batch.ancestors[row, : batch.num_ancestors[row]]))
        block, offset = attended // BLOCK_SIZE, attended % BLOCK_SIZE
        key = keys[block, :, :, offset].float().repeat_interleave(group, dim=1)
        value = values[block, :, offset].float().repeat_interleave(group, dim=1)
        weights = torch.softmax(torch.einsum("hd,nhd->hn", query[row].float(), key) * scale, dim=1)
        out[row] = torch.einsum("hn,nhd->hd", weights, value)
    return out


class PlainPlatform(Platform):
    """torch's linears on a CPU, and nothing packed: the kinds of CUDA."""

    packs, linear, head = False, Linear, Head

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @property
    @override
    def arithmetic(self) -> str:
        return "plain"

    @override
    def new_cache(self, config: DecoderConfig, num_blocks: int, dtype: torch.dtype, state_width: int) -> KVCache:
        shape = (config.num_layers, num_blocks, config.num_kv_heads)
        return KVCache(
            torch.zeros((*shape, config.head_dim, BLOCK_SIZE), dtype=dtype),
            torch.zeros((*shape, BLOCK_SIZE, config.head_dim), dtype=dtype),
            torch.zeros((num_blocks * BLOCK_SIZE, state_width), dtype=dtype),
        )

    @override
    def attention(self, batch: Batch) -> Attention:
        return partial(attend, batch)

    @override
    def llama(self, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> PlainBackend:
        return PlainBackend(self, config, shape, weights)


class PlainBackend(LlamaBackend):
    """Layer by layer; arguments as `LlamaBackend`."""

    def __init__(self, platform: Platform, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> None:
        super().__init__(platform, config, shape, weights)
        self._shape = shape

    @override
    def forward(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        weights, wanted = self.weights, torch.from_numpy(batch.logit_rows)
        residual, entering = self._enter(batch)
        tapped: dict[int, torch.Tensor] = {}
        for index in range(len(weights.layers)) if layers is None else layers:
            tapped[index], layer = residual, weights.layers[index]
            query, key, value = self._project(layer, residual, entering, batch.positions)
            entering = None
            attended = attend(batch, query, key, value, cache.keys[index], cache.values[index], self._scale)
            residual = residual + layer.out(attended.flatten(1))
            gate, up = layer.gate_up(self._norm(residual, layer.post_norm)).chunk(2, dim=-1)
            residual = residual + layer.down(functional.silu(gate) * up)
        tapped[len(weights.layers)] = residual
        final = self._norm(residual, weights.final_norm)
        if kept.width:
            cache.keep_states(torch.from_numpy(batch.slots), kept.states(tapped, final))
        return weights.head(final[wanted])

    def _enter(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        embedded = functional.embedding(torch.from_numpy(batch.token_ids), self.weights.embedding).float()
        feature_norm = self.weights.feature_norm
        if feature_norm is None:
            return embedded, None
        assert batch.features is not None, "such a model takes features"
        given = torch.from_numpy(batch.features)
        normed = self._norm(given, feature_norm)
        entering = torch.cat([self._norm(embedded, self.weights.layers[0].input_norm), normed], dim=-1)
        return given, entering

    def _project(
        self, layer: LlamaLayer, residual: torch.Tensor, entering: torch.Tensor | None, positions: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [rows, H, D], and keys and values [rows, G, D]."""
        config, rope = self.config, self._shape.rope
        qkv = layer.qkv(self._norm(residual, layer.input_norm) if entering is None else entering)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = qkv.view(len(qkv), -1, config.head_dim).split(sizes, dim=1)
        angles = torch.from_numpy(positions)[:, None, None].float() * torch.tensor(rope.inverse)
        cos, sin = angles.cos() * rope.attention_scaling, angles.sin() * rope.attention_scaling

        def turned(heads: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
            low, high = (self._norm(heads, norm) if len(norm) else heads).chunk(2, dim=-1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

        return turned(query, layer.query_norm), turned(key, layer.key_norm), value

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(rows, (rows.shape[-1],), weight, self._shape.rms_norm_eps)
