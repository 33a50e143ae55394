"""Weights of the Llama family, fused and packed. Knows names and shapes; computes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.engine.linear import Head, Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """One layer; norms are float32, and the q/k norms [head_dim] are empty where the family has none."""

    input_norm: torch.Tensor
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order in which a step runs them."""
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        """What one step reads of this layer."""
        return sum(linear.nbytes for linear in self.linears)


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureInput:
    """How a layer takes `Batch.features` beside the tokens: both normalised, side by side.

    Attributes:
        norm: float32 [hidden], of features; the layer's own norm is that of embeddings.
        normed_residual: Whether the residual stream starts from the normalised feature.
    """

    norm: torch.Tensor
    normed_residual: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All weights of a decoder.

    Attributes:
        embedding: [vocab, hidden].
        final_norm: float32 [hidden].
        head: From final hidden states to logits.
        features: How the first layer takes features; None: it takes the normalised embedding alone.
    """

    embedding: torch.Tensor
    layers: tuple[LlamaLayer, ...]
    final_norm: torch.Tensor
    head: Head
    features: FeatureInput | None = None
