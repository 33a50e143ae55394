"""A rank's share of the Llama family's weights, cut as in Megatron-LM (1909.08053); knows names and shapes.

Queries, keys and values are cut by heads, gate and up by neurons: every rank computes some of them from whole rows.
The linears that close a block, o_proj and down_proj, are cut by what they take, so their outputs are summands of the
whole and are summed over the ranks. Embedding and norms are whole on every rank, the head is cut by token ids.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from paceline.core.errors import ConfigError
from paceline.engine.backends.interface import Platform
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.config import LEAN_ARCHITECTURES, DecoderConfig, LlamaShape
from paceline.engine.linear import Head, Linear
from paceline.engine.llama import LlamaWeights
from paceline.engine.llama_reader import LlamaReader
from paceline.engine.ranks import Ranks

FLAG: Final = "--tensor-parallel-size"
# The dimension along which the weights of a module are cut.
_CUT: Final = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "gate_proj": 0, "up_proj": 0, "o_proj": 1, "down_proj": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank has of a model.

    Attributes:
        config: As the whole model's, with this rank's numbers of heads.
        shape: As the whole model's, with this rank's number of neurons.
        first_kv_head: Where this rank's KV heads begin; ranks have some in common where there are fewer than ranks.
        num_kv_heads: Of the whole model.
    """

    config: DecoderConfig
    shape: LlamaShape
    first_kv_head: int
    num_kv_heads: int


def check_shares(config: DecoderConfig, size: int) -> None:
    """Checks what can be checked before any rank starts.

    Raises:
        ConfigError: The model cannot be cut into so many equal parts, or is not of the Llama family; names the field.
    """
    if config.architecture not in LEAN_ARCHITECTURES:
        served = ", ".join(sorted(LEAN_ARCHITECTURES))
        raise ConfigError(f"{FLAG} {size}: serves {served}; {config.architecture} runs on one rank only")
    _check_divides("num_attention_heads", config.num_heads, size)
    if size % config.num_kv_heads:
        _check_divides("num_key_value_heads", config.num_kv_heads, size)


def share_of(config: DecoderConfig, shape: LlamaShape, rank: int, size: int) -> Share:
    """Returns the part of a rank.

    Raises:
        ConfigError: As `check_shares`.
    """
    check_shares(config, size)
    _check_divides("intermediate_size", shape.intermediate_size, size)
    return Share(
        config=replace(config, num_heads=config.num_heads // size, num_kv_heads=max(1, config.num_kv_heads // size)),
        shape=replace(shape, intermediate_size=shape.intermediate_size // size),
        first_kv_head=rank * config.num_kv_heads // size,
        num_kv_heads=config.num_kv_heads,
    )


def _check_divides(field: str, count: int, size: int) -> None:
    if count % size:
        raise ConfigError(f"{field}: {count} cannot be shared equally among the ranks of {FLAG} {size}")


class SummedLinear(Linear):
    """A linear whose inputs are cut: every rank's result is the sum of all ranks' summands, in float32.

    Args:
        summand: Of this rank's weight [out, in / size] and bias [out].
        ranks: All of them.
    """

    def __init__(self, summand: Linear, ranks: Ranks) -> None:
        self.dtype, self.nbytes = summand.dtype, summand.nbytes
        self.in_features, self.out_features = summand.in_features, summand.out_features
        self._summand, self._ranks = summand, ranks

    def raw(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in / size] -> float32 [rows, out]; all ranks call it at once."""
        return self._ranks.sum(self._summand.raw(rows))

    def rows_computed(self, count: int) -> int:
        """See `Linear`."""
        return self._summand.rows_computed(count)


class GatheredHead(Head):
    """The language model head cut by token ids; the logits come together on rank 0.

    Attributes:
        nbytes: Of this rank's part.
    """

    def __init__(self, part: Head, ranks: Ranks, vocab_size: int) -> None:
        """Takes this rank's part, of ceil(vocab / size) ids, where the last one's may have some to spare."""
        self._part = part
        self._ranks = ranks
        self._vocab_size = vocab_size
        self.nbytes = self._part.nbytes

    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, hidden] -> float32 [rows, vocab] on rank 0, zeros elsewhere; all ranks call it at once."""
        logits = torch.zeros((len(rows), self._vocab_size), dtype=torch.float32, device=rows.device)
        if len(rows):
            parts = self._ranks.gather(self._part(rows))
            for part, place in zip(parts, logits.split(parts.shape[-1], dim=-1), strict=False):
                place.copy_(part[:, : place.shape[-1]])
        return logits


class ShardReader(LlamaReader):
    """Reads a rank's share and no more.

    Args:
        checkpoint: Of the whole model.
        share: This rank's.
        dtype: Wanted kind.
        platform: Makes linears.
        ranks: All of them; they compute sums and logits together.
    """

    def __init__(
        self, checkpoint: Checkpoint, share: Share, dtype: torch.dtype, platform: Platform, ranks: Ranks
    ) -> None:
        super().__init__(checkpoint, share.config, share.shape, dtype, platform)
        self._share = share
        self._ranks = ranks

    def read(self) -> LlamaWeights:
        """See `LlamaReader`; nobody has seen the ranks' sums recorded in a graph."""
        return replace(super().read(), recordable=False)

    def weight(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """This rank's part, of this shape, of a matrix or bias.

        Outputs of `SummedLinear` are summed, so rank 0 alone has their bias.
        """
        module, kind = name.split(".")[-2:]
        dim = _CUT.get(module)
        if dim is None or (kind == "bias" and dim == 1):
            whole = super().weight(name, shape)
            return whole if dim is None or self._ranks.rank == 0 else torch.zeros_like(whole)
        first, total = self._ranks.rank * shape[dim], shape[dim] * self._ranks.size
        if module in ("k_proj", "v_proj"):
            head_dim = self._share.config.head_dim
            first, total = self._share.first_kv_head * head_dim, self._share.num_kv_heads * head_dim
        return self._part(name, (*shape[:dim], total, *shape[dim + 1 :]), dim, first, first + shape[dim])

    def _part(self, name: str, shape: tuple[int, ...], dim: int, first: int, last: int) -> torch.Tensor:
        return self._checkpoint.part(name, shape, dim, first, last).to(device=self._device, dtype=self._dtype)

    def _closing(self, prefix: str, name: str, out_features: int, in_features: int) -> Linear:
        return SummedLinear(super()._closing(prefix, name, out_features, in_features), self._ranks)

    def _head(self, embedding: torch.Tensor) -> Head:
        vocab, hidden = embedding.shape
        count = -(-vocab // self._ranks.size)
        first = min(vocab, self._ranks.rank * count)
        last = min(vocab, first + count)
        if self._shape.tied_head:
            part = embedding[first:last]
        else:
            part = self._part("lm_head.weight", (vocab, hidden), 0, first, last)
        if len(part) < count:
            part = torch.nn.functional.pad(part, (0, 0, 0, count - len(part)))
        return GatheredHead(self._platform.head(part), self._ranks, vocab)
