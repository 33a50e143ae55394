"""What back ends of the Llama family have in common."""

from __future__ import annotations

import torch

from paceline.engine.backends.interface import Backend, Platform
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.llama import LlamaWeights


class LlamaBackend(Backend):
    """Llama, Mistral, Qwen2, Qwen3 and EAGLE-3 heads, with as little as possible between the linear layers.

    The residual stream is float32.

    Args:
        platform: Where it computes.
        config: Sizes.
        shape: More of them.
        weights: On the platform's device, made of its linears.
    """

    def __init__(self, platform: Platform, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> None:
        self.platform, self.config, self.weights = platform, config, weights
        self.dtype, self.hidden_size = weights.embedding.dtype, shape.hidden_size
        self.layer_bytes = tuple(layer.nbytes for layer in weights.layers)
        self.weight_bytes = weights.head.nbytes + sum(self.layer_bytes)
        self.feature_width = 0 if weights.features is None else shape.hidden_size
        self._scale = config.head_dim**-0.5

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Backend`."""
        return self.weights.head(rows)
