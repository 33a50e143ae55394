"""Hidden states that a step keeps beside the KV of each row, for those who draft from them.

They lie in the same slots as the KV, so whatever becomes of a slot (kept, copied, cached, forgotten) becomes of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.engine.layers import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """A row's state: outputs of layers or their fusion, then the final hidden state.

    Attributes:
        hidden_size: The model's hidden size.
        layers: Layers whose outputs (the residual stream, not normalised) are kept, in this order.
        fuse: [fused, len(layers) * hidden_size], what is kept in their place; None: themselves.
        final: Whether the final hidden state, normalised as the head takes it, is kept.
    """

    hidden_size: int = 0
    layers: tuple[int, ...] = ()
    fuse: Linear | None = None
    final: bool = False

    @property
    def fused_width(self) -> int:
        """Numbers of the part before the final hidden state."""
        return len(self.layers) * self.hidden_size if self.fuse is None else self.fuse.out_features

    @property
    def width(self) -> int:
        return self.fused_width + (self.hidden_size if self.final else 0)

    @property
    def nbytes(self) -> int:
        """Bytes that a step reads for it."""
        return 0 if self.fuse is None else self.fuse.nbytes

    @property
    def taps(self) -> frozenset[int]:
        """Layers before which the residual stream is an output that is kept; one more than the last is its end."""
        return frozenset(layer + 1 for layer in self.layers)

    def states(self, tapped: Mapping[int, torch.Tensor], final: torch.Tensor) -> torch.Tensor:
        """States [rows, width] from residual streams [rows, hidden] by tap and final hidden states [rows, hidden]."""
        parts: list[torch.Tensor] = []
        if self.layers:
            outputs = torch.cat([tapped[layer + 1] for layer in self.layers], dim=-1)
            parts.append(outputs if self.fuse is None else self.fuse(outputs))
        if self.final:
            parts.append(final)
        return torch.cat(parts, dim=-1)


NO_STATES = StateLayout()
