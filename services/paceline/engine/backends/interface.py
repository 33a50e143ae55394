"""Interfaces of all that depends on how and where a decoder runs: its back end, and the platform below that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from typing_extensions import override

from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.hidden_states import StateLayout
from paceline.engine.kv import KVCache
from paceline.engine.layers import Head, Linear, LlamaWeights
from paceline.engine.levels import draft_by_levels
from paceline.engine.model import Burst, Drafted, Pending
from paceline.engine.pending import HostPending, Ranks, VerifyRequest

Layers = tuple[int, ...] | None
# A batch's attention in a layer: writes new keys and values [rows, G, D] into the rows' slots, and has query
# [rows, H, D] attend; returns as much. (query, new_keys, new_values, keys and values as in `KVCache`, scale).
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raises MemoryError where the device has no room, or pinned memory cannot be had."""
    try:
        yield
    except RuntimeError as error:
        # Torch has no class of its own for pinned memory errors.
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        torch.cuda.empty_cache()
        raise MemoryError(str(error)) from error


class Backend(ABC):
    """Computes the steps of one model; a decoder holds one.

    Attributes:
        platform: Where it computes.
        config: Sizes and limits.
        dtype: Type of the weights.
        hidden_size: Width of the final hidden states.
        weight_bytes: Weight bytes that a step reads.
        layer_bytes: Weight bytes of each layer; empty where layers do not run alone.
        feature_width: Numbers of `Batch.features` a row; 0: it takes tokens alone.
    """

    platform: Platform
    config: DecoderConfig
    dtype: torch.dtype
    hidden_size: int
    weight_bytes: int
    layer_bytes: tuple[int, ...] = ()
    feature_width = 0

    @abstractmethod
    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """The language model head: final hidden states, float32 [rows, hidden], to logits, float32 [rows, vocab]."""

    @abstractmethod
    def forward(self, batch: Batch, cache: KVCache, kept: StateLayout, layers: Layers = None) -> torch.Tensor:
        """Writes the rows' KV and states, and returns float32 logits [k, vocab] of `batch.logit_rows`, in that order.

        Args:
            kept: The states that are written.
            layers: Runs these layers alone, in this order; None runs all.
        """

    def launch(self, batch: Batch, cache: KVCache, kept: StateLayout, wanted: VerifyRequest | Ranks | None) -> Pending:
        """Starts a step; see `paceline.engine.model.Model`."""
        return HostPending(self.forward(batch, cache, kept).cpu().numpy())

    def draft(self, batch: Batch, cache: KVCache, kept: StateLayout, burst: Burst) -> Drafted:
        """Runs a burst; see `paceline.engine.model.Model`."""
        states = cache.features if self.feature_width else None
        return draft_by_levels(lambda rows, ranks: self.launch(rows, cache, kept, ranks), batch, burst, states)

    def check_states(self, layout: StateLayout) -> None:  # noqa: B027 - most can keep any
        """Refuses states that `forward` cannot keep.

        Raises:
            ConfigError: It cannot; names the reason.
        """

    def new_cache(self, num_blocks: int, state_width: int) -> KVCache:
        """An empty cache of the right shape."""
        return self.platform.new_cache(self.config, num_blocks, self.dtype, state_width)

    def prepare(  # noqa: B027 - most need nothing
        self, max_rows: int, cache: KVCache, kept: StateLayout, *, drafts: bool
    ) -> None:
        """Makes at once what steps of up to `max_rows` rows over a cache need.

        Args:
            drafts: Bursts are to come, too.
        """


class Platform(ABC):
    """A device kind's parts, of which backends and heads are made.

    Attributes:
        device: Where tensors lie.
        packs: Whether linears are packed, and take float32 rows whatever their weights are.
        linear: Makes a linear of weight [out, in] and bias [out]; both may be dropped afterwards.
        head: Makes a head of weight [vocab, hidden].
    """

    device: torch.device
    packs: bool
    linear: type[Linear]
    head: type[Head]

    @property
    @abstractmethod
    def arithmetic(self) -> str:
        """Names what decides the last bits of logits beside weights: kind of device, versions, our own kernels."""

    @abstractmethod
    def new_cache(self, config: DecoderConfig, num_blocks: int, dtype: torch.dtype, state_width: int) -> KVCache:
        """An empty cache of `num_blocks` blocks."""

    @abstractmethod
    def attention(self, batch: Batch) -> Attention:
        """Attention of a batch over caches of `new_cache`."""

    @abstractmethod
    def llama(self, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> Backend:
        """The back end of a model of the Llama family, whose weights lie on the device."""


class LlamaBackend(Backend):
    """Llama, Mistral, Qwen2, Qwen3 and EAGLE-3 heads, with as little as possible between the linear layers.

    The residual stream is float32.

    Args:
        platform: Where it computes.
        shape: More of them.
        weights: On the platform's device, made of its linears.
    """

    def __init__(self, platform: Platform, config: DecoderConfig, shape: LlamaShape, weights: LlamaWeights) -> None:
        self.platform, self.config, self.weights = platform, config, weights
        self.dtype, self.hidden_size = weights.embedding.dtype, shape.hidden_size
        self.layer_bytes = tuple(layer.nbytes for layer in weights.layers)
        self.weight_bytes = weights.head.nbytes + sum(self.layer_bytes)
        self.feature_width = 0 if weights.feature_norm is None else shape.hidden_size
        self._scale = config.head_dim**-0.5

    @override
    def head(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weights.head(rows)
