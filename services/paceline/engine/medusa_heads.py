"""Medusa heads (2401.10774): small blocks over the target's final hidden state, one for each token ahead.

Reads a checkpoint folder and computes logits; which state to give and what to guess is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from paceline.checkpoints.families import architectures
from paceline.checkpoints.json_files import CONFIG, read_object, whole
from paceline.core.errors import ConfigError
from paceline.core.params import MAX_DRAFT_TOKENS
from paceline.engine.backends.interface import memory_errors
from paceline.engine.checkpoint import Checkpoint
from paceline.engine.decoder import Decoder
from paceline.engine.layers import Linear

MODEL_TYPE: Final = "medusa"
ARCHITECTURE: Final = "MedusaModel"
MOST_BLOCKS: Final = 16

# From final hidden states, float32 [rows, hidden], to logits, float32 [rows, vocab].
Head = Callable[[torch.Tensor], torch.Tensor]


class MedusaHeads:
    """Heads of one target.

    Head k, from 0, sees the state that chose the token at position i and guesses the token at i + 1 + k.

    Args:
        blocks: Blocks of each head, `x + silu(W x + b)` (section 2.1.1).
        heads: From the last block's output to logits, one for each head, or one for all of them: the target's own.

    Attributes:
        hidden_size: Width of the states.
    """

    def __init__(self, blocks: Sequence[Sequence[Linear]], heads: Sequence[Head]) -> None:
        self._blocks = blocks
        self._heads = heads
        self.hidden_size = blocks[0][0].in_features

    @classmethod
    def load(cls, folder: Path, decoder: Decoder) -> MedusaHeads:
        """Reads the heads of a target, in the kind of its weights.

        The folder holds `{k}.{r}.linear.weight` [hidden, hidden] and `.bias` [hidden] for block r of head k, and
        `{k}.{blocks}.weight` [vocab, hidden]; where no head has the latter, all use the target's own.

        Raises:
            ConfigError: A file or tensor is missing, pickled, or does not fit the target; says what to do.
        """
        hidden, vocab = decoder.hidden_size, decoder.config.vocab_size
        num_heads, num_blocks = _sizes(folder, hidden, vocab)
        checkpoint = Checkpoint(folder)

        def weight(name: str, *size: int) -> torch.Tensor:
            return checkpoint.tensor(name, size).to(device=decoder.device, dtype=decoder.dtype)

        blocks = [
            [
                decoder.platform.linear(weight(f"{head}.{block}.linear.weight", hidden, hidden),
                       weight(f"{head}.{block}.linear.bias", hidden))
                for block in range(num_blocks)
            ]
            for head in range(num_heads)
        ]  # fmt: skip
        names = [f"{head}.{num_blocks}.weight" for head in range(num_heads)]
        if not any(map(checkpoint.has, names)):
            return cls(blocks, [decoder.head])
        return cls(blocks, [decoder.platform.head(weight(name, vocab, hidden)) for name in names])

    def __len__(self) -> int:
        return len(self._blocks)

    @memory_errors()
    @torch.inference_mode()
    def __call__(self, states: torch.Tensor, count: int) -> torch.Tensor:
        """Logits, float32 [count, rows, vocab], of the first `count` heads over states, float32 [rows, hidden]."""
        outputs = [_through(blocks, states) for blocks in self._blocks[:count]]
        if len(self._heads) == 1:
            return self._heads[0](torch.cat(outputs)).view(count, len(states), -1)
        return torch.stack([head(output) for head, output in zip(self._heads, outputs, strict=False)])


def _through(blocks: Sequence[Linear], rows: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        rows = rows + torch.nn.functional.silu(block(rows))
    return rows


def _sizes(folder: Path, hidden_size: int, vocab_size: int) -> tuple[int, int]:
    """Returns how many heads a folder holds for a target of these sizes, and how many residual blocks each has.

    Raises:
        ConfigError: It holds no Medusa heads, or those of another target; names the field.
    """
    described = read_object(folder / CONFIG)
    if described.get("model_type") != MODEL_TYPE and ARCHITECTURE not in architectures(described):
        raise ConfigError(f"{folder} holds no Medusa heads: model_type in its config.json is not {MODEL_TYPE!r}")
    for field, size in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if described.get(field, size) != size:
            raise ConfigError(
                f"{folder}: {field} in config.json is {described[field]!r}, the target's is {size}: "
                "these heads were trained for another target"
            )
    num_heads, num_blocks = (
        whole(described.get(field), f"{folder / CONFIG}: {field}", high=most)
        for field, most in (("medusa_num_heads", MAX_DRAFT_TOKENS), ("medusa_num_layers", MOST_BLOCKS))
    )
    return num_heads, num_blocks
