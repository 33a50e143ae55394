"""Reads the weights of the Llama family from a checkpoint: fused, and made of a platform's linears."""

from __future__ import annotations

import logging
from typing import Final

import torch

from paceline.engine.backends.interface import Platform
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.layers import Head, Linear, LlamaLayer, LlamaWeights

logger = logging.getLogger(__name__)

HEAD: Final = "lm_head.weight"


class LlamaReader:
    """Reads the weights of one checkpoint in the wanted kind, for a platform."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: DecoderConfig,
        shape: LlamaShape,
        dtype: torch.dtype,
        platform: Platform,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._shape = shape
        self._dtype = dtype
        self._platform = platform
        self._device = platform.device

    def read(self) -> LlamaWeights:
        """Reads and packs everything.

        Raises:
            ConfigError: A tensor is missing or has another shape than config.json says.
        """
        vocab = (self._config.vocab_size, self._shape.hidden_size)
        embedding = self.embedding(vocab)
        hidden = self._shape.hidden_size
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(self.layer(f"model.layers.{index}", hidden) for index in range(self._config.num_layers)),
            final_norm=self.norm("model.norm.weight", hidden),
            head=self._head(embedding),
        )

    def _head(self, embedding: torch.Tensor) -> Head:
        return self._platform.head(self.head_weight(embedding))

    def head_weight(self, embedding: torch.Tensor) -> torch.Tensor:
        """The weight [vocab, hidden] of the head: the embedding's where they are tied and the file has no other."""
        if self._shape.tied_head and not self._checkpoint.has(HEAD):
            return embedding
        head = self.weight(HEAD, tuple(embedding.shape))
        if not self._shape.tied_head:
            return head
        if torch.equal(head, embedding):
            return embedding
        logger.warning("tie_word_embeddings: config.json ties the head, but the file has another: that is used")
        return head

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A weight matrix, in kind and place."""
        return self._checkpoint.tensor(name, shape).to(device=self._device, dtype=self._dtype)

    def embedding(self, shape: tuple[int, int]) -> torch.Tensor:
        """The embedding [vocab, hidden]; a copy, as the file stays mapped, whole, while a tensor is a view of it."""
        embedding = self.weight("model.embed_tokens.weight", shape)
        return embedding.clone() if self._device.type == "cpu" else embedding

    def norm(self, name: str, size: int) -> torch.Tensor:
        """The weight [size] of one norm, float32."""
        return self._checkpoint.tensor(name, (size,)).to(device=self._device, dtype=torch.float32).contiguous()

    def _head_norm(self, name: str) -> torch.Tensor:
        if self._checkpoint.has(name):
            return self.norm(name, self._config.head_dim)
        return torch.empty(0, dtype=torch.float32, device=self._device)

    def _fused(self, prefix: str, parts: dict[str, int], in_features: int) -> Linear:
        """Fuses several linears: their outputs follow one another; missing biases count as zero."""
        weights = [self.weight(f"{prefix}.{name}.weight", (size, in_features)) for name, size in parts.items()]
        named = {name: f"{prefix}.{name}.bias" for name in parts}
        if not any(self._checkpoint.has(name) for name in named.values()):
            return self._platform.linear(torch.cat(weights))
        biases = [
            self.weight(named[name], (size,))
            if self._checkpoint.has(named[name])
            else torch.zeros(size, dtype=self._dtype, device=self._device)
            for name, size in parts.items()
        ]
        return self._platform.linear(torch.cat(weights), torch.cat(biases))

    def layer(self, prefix: str, in_features: int) -> LlamaLayer:
        """Reads a layer whose queries, keys and values take `in_features` inputs."""
        config, shape = self._config, self._shape
        hidden, inner = shape.hidden_size, shape.intermediate_size
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return LlamaLayer(
            input_norm=self.norm(f"{prefix}.input_layernorm.weight", hidden),
            query_norm=self._head_norm(f"{attention}.q_norm.weight"),
            key_norm=self._head_norm(f"{attention}.k_norm.weight"),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm.weight", hidden),
            qkv=self._fused(attention, {"q_proj": query, "k_proj": kv, "v_proj": kv}, in_features),
            out=self._fused(attention, {"o_proj": hidden}, query),
            gate_up=self._fused(mlp, {"gate_proj": inner, "up_proj": inner}, hidden),
            down=self._fused(mlp, {"down_proj": hidden}, inner),
        )
