"""Models of random weights for `loadtest.gpu`, and what makes two of them agree as often as asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from typing_extensions import override

from paceline.engine.backends.cuda.backend import CudaBackend
from paceline.engine.backends.cuda.platform import CudaPlatform
from paceline.engine.backends.cuda.stream import Stream
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.decoder import Decoder
from paceline.engine.layers import LlamaLayer, LlamaWeights, RopeFrequencies

WEIGHT_STD = 0.02
# Logits of standard deviation 1 over 128,256 ids have a log-sum-exp of 12: the raised one is chosen at any temperature.
RAISED = 40.0


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
        ModelShape("tiny target", 2, 64, 128, 4, 2, 16, 128, tied_head=False),
        ModelShape("tiny drafter", 1, 64, 128, 4, 2, 16, 128, tied_head=True),
    ),
}


class RandomModel:
    """Random bfloat16 weights, made where they are used."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self._stream = Stream(device)
        self._platform = CudaPlatform(device, self._stream)
        self.weights = self._weights()

    def decoder(self, agreement: float | None = None) -> Decoder:
        """A decoder over these weights; `agreement` as in `ImposedBackend`."""
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
        backend = ImposedBackend(self._platform, config, more, self.weights, self._stream)
        backend.agreement = agreement
        return Decoder(backend)

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


class ImposedBackend(CudaBackend):
    """A back end that raises one logit a row once its layers are over, by a dozen small kernels on the device.

    Attributes:
        agreement: Probability that the raised token is the one that the rule names; None: none is raised.
    """

    agreement: float | None = None

    @override
    def _logits(self, final: torch.Tensor, sent: Mapping[str, torch.Tensor]) -> torch.Tensor:
        logits = super()._logits(final, sent)
        if (agreement := self.agreement) is not None:
            self._impose(logits, sent, agreement)
        return logits

    def _impose(self, logits: torch.Tensor, sent: Mapping[str, torch.Tensor], agreement: float) -> None:
        rows = sent["logit_rows"]
        mixed = sent["token_ids"][rows].long() * 1_000_003 + sent["positions"][rows].long() * 7_919
        mixed = (mixed ^ (mixed >> 11)) * 48_271 % 2_147_483_647
        agrees = mixed % 10_000 < 10_000 * agreement
        token_ids = (mixed // 10_000 + torch.where(agrees, 0, 1)) % self.config.vocab_size
        logits[torch.arange(len(rows), device=rows.device), token_ids] = RAISED
