"""Models of random weights for `loadtest.gpu`, and what makes two of them agree as often as asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from paceline.engine.backends.cuda.platform import CudaPlatform
from paceline.engine.backends.interface import Layers
from paceline.engine.batch import Batch
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.decoder import Decoder
from paceline.engine.kv import KVCache
from paceline.engine.llama import LlamaLayer, LlamaWeights
from paceline.engine.pending import HostPending, Ranks, Walks
from paceline.engine.rope import RopeFrequencies

WEIGHT_STD = 0.02


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model of random weights."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool
    context_len: int = 131072


# Target and drafter: of meta-llama/Llama-3.1-8B and meta-llama/Llama-3.2-1B, and tiny ones.
SHAPES = {
    "8b": (
        ModelShape("8B-shaped target", 32, 4096, 14336, 32, 8, 128, 128256, tied_head=False),
        ModelShape("1B-shaped drafter", 16, 2048, 8192, 32, 8, 64, 128256, tied_head=True),
    ),
    "tiny": (
        ModelShape("tiny target", 2, 64, 128, 4, 2, 16, 512, tied_head=False),
        ModelShape("tiny drafter", 1, 64, 128, 4, 2, 16, 512, tied_head=True),
    ),
}


class RandomModel:
    """Random bfloat16 weights, made where they are used."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self._platform = CudaPlatform(device)
        self.weights = self._weights()

    def decoder(self) -> Decoder:
        shape = self.shape
        config = DecoderConfig(
            model_type="llama",
            architecture="LlamaForCausalLM",
            vocab_size=shape.vocab_size,
            context_len=shape.context_len,
            longest_context_len=shape.context_len,
            eos_token_ids=(),
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
        )
        inverse = 1.0 / 500000.0 ** (torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        more = LlamaShape(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            rms_norm_eps=1e-5,
            tied_head=shape.tied_head,
            rope=RopeFrequencies(inverse=tuple(inverse.tolist()), attention_scaling=1.0),
        )
        return Decoder(self._platform.llama(config, more, self.weights))

    def _weights(self) -> LlamaWeights:
        shape = self.shape
        embedding = self._matrix(shape.vocab_size, shape.hidden_size)
        head = embedding if shape.tied_head else self._matrix(shape.vocab_size, shape.hidden_size)
        return LlamaWeights(
            embedding=embedding,
            layers=tuple(self._layer() for _ in range(shape.num_layers)),
            final_norm=self._final_norm(),
            head=self._platform.head(head),
        )

    def _final_norm(self) -> torch.Tensor:
        """Makes logits of a standard deviation of 1, so that an imposed one stands out by a known amount.

        Its random signs keep a tied head from naming the token that went in.
        """
        size = self.shape.hidden_size
        signs = torch.randint(0, 2, (size,), device=self.device) * 2.0 - 1.0
        return signs / (WEIGHT_STD * math.sqrt(size))

    def _layer(self) -> LlamaLayer:
        shape = self.shape
        query, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return LlamaLayer(
            input_norm=self._norm(shape.hidden_size),
            query_norm=self._norm(0),
            key_norm=self._norm(0),
            post_norm=self._norm(shape.hidden_size),
            qkv=self._platform.linear(self._matrix(query + 2 * kv, shape.hidden_size)),
            out=self._platform.linear(self._matrix(shape.hidden_size, query)),
            gate_up=self._platform.linear(self._matrix(2 * shape.intermediate_size, shape.hidden_size)),
            down=self._platform.linear(self._matrix(shape.hidden_size, shape.intermediate_size)),
        )

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty((rows, columns), dtype=torch.bfloat16, device=self.device).normal_(std=WEIGHT_STD)

    def _norm(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.float32, device=self.device)


class ImposedDecoder(Decoder):
    """A decoder that raises one logit a row once its forward pass is over.

    Args:
        inner: Does the work.
        agreement: Probability that the raised token is the one that the rule names.
    """

    def __init__(self, inner: Decoder, agreement: float) -> None:
        super().__init__(inner.backend)
        self._agreement = agreement
        # Logits of standard deviation 1 have a log-sum-exp of ln(vocab) + 1/2: the raised one's share is right.
        odds = min(agreement, 0.999) / (1.0 - min(agreement, 0.999))
        self._logit = math.log(self.config.vocab_size) + 0.5 + math.log(max(odds, 1e-3))

    def launch(self, batch: Batch, cache: KVCache, wanted: Walks | Ranks | None) -> HostPending:
        """Runs the step."""
        del wanted
        return HostPending(self.forward(batch, cache).numpy())

    def forward(self, batch: Batch, cache: KVCache, layers: Layers = None) -> torch.Tensor:
        """Runs the step and raises the logits, which come on the host."""
        logits = super().forward(batch, cache, layers).cpu()
        rows = batch.logit_rows
        named = mix(batch.token_ids[rows], batch.positions[rows], 1) % self.config.vocab_size
        coins = mix(batch.token_ids[rows], batch.positions[rows], 2) % 10_000
        chosen = np.where(coins < 10_000 * self._agreement, named, (named + 1) % self.config.vocab_size)
        # Through numpy, because the tensor was made in inference mode.
        logits.numpy()[np.arange(len(rows)), chosen] = max(self._logit, 8.0)
        return logits


def mix(token_ids: np.ndarray, positions: np.ndarray, salt: int) -> np.ndarray:
    """Hashes of token and position, int64 and not negative (the finalizer of SplitMix64)."""
    mixed = token_ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64)
    mixed += np.uint64(salt << 40)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(33)).astype(np.int64)
