"""Medusa heads on a frozen target (Medusa-1, Cai et al. 2024, arXiv 2401.10774, section 2.2.1).

Head `k` guesses the token `2 + k` behind the place whose final state it reads; the target's own head
gives the token right behind. The heads share the target's output head unless they have their own.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from training.models import Drafted, head_weight

ARCHITECTURE = "MedusaModel"


class ResidualBlock(nn.Module):
    """`x + silu(W x + b)`; W and b begin at 0, so that a new head predicts what the target's does."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """States of the same shape, `[..., hidden]`."""
        return states + functional.silu(self.linear(states))


class MedusaHeads(nn.ModuleList):
    """The heads; parameters are named as in the published layout.

    Args:
        target: its output head is used, or copied with `own_heads`.
        heads: number of heads.
        blocks: residual blocks of a head.
        own_heads: whether every head has a vocabulary matrix of its own.
    """

    taps: tuple[int, ...] = ()
    draft_ids: torch.Tensor | None = None
    target_head: torch.Tensor

    def __init__(self, target: PreTrainedModel, heads: int, blocks: int, own_heads: bool) -> None:
        weight = head_weight(target).detach()
        vocab, hidden = weight.shape
        layers: list[list[nn.Module]] = [[ResidualBlock(hidden) for _ in range(blocks)] for _ in range(heads)]
        if own_heads:
            for head in layers:
                own = nn.Linear(hidden, vocab, bias=False)
                own.weight = nn.Parameter(weight.clone())
                head.append(own)
        super().__init__(nn.Sequential(*head) for head in layers)
        self._blocks = blocks
        self._base_name = Path(str(target.name_or_path)).name
        self.register_buffer("target_head", weight, persistent=False)

    @property
    def layout(self) -> dict[str, object]:
        """Content of config.json."""
        vocab, hidden = self.target_head.shape
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "medusa",
            "medusa_num_heads": len(self),
            "medusa_num_layers": self._blocks,
            "hidden_size": hidden,
            "vocab_size": vocab,
            "dtype": "bfloat16",
            "base_model_name_or_path": self._base_name,
        }

    def chain(self, ids: torch.Tensor, states: torch.Tensor, positions: int) -> list[Drafted]:
        """Guesses along a text; all positions read the same state."""
        return [self._drafted(k, states[:, : ids.shape[1] - 1 - k]) for k in range(min(positions, len(self)))]

    def _drafted(self, k: int, states: torch.Tensor) -> Drafted:
        layers = list(self[k].children())
        for block in layers[: self._blocks]:
            states = block(states)
        head = layers[self._blocks].weight if len(layers) > self._blocks else self.target_head
        assert isinstance(head, torch.Tensor)
        return Drafted(states=states, head=head)


def load_medusa(folder: Path, target: PreTrainedModel) -> MedusaHeads:
    """Heads of a folder, float32, for this target.

    Raises:
        FileNotFoundError: the folder lacks config.json or weights.
        ValueError: they were made for a target of another shape.
    """
    layout = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    vocab, hidden = head_weight(target).shape
    for name, size in (("hidden_size", hidden), ("vocab_size", vocab)):
        if layout[name] != size:
            raise ValueError(f"{name} of the heads is {layout[name]}, of the target {size}")
    weights = load_file(folder / "model.safetensors")
    blocks = layout["medusa_num_layers"]
    heads = MedusaHeads(target, layout["medusa_num_heads"], blocks, f"0.{blocks}.weight" in weights)
    heads.load_state_dict({name: value.float() for name, value in weights.items()})
    return heads.eval()
