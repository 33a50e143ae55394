"""The cache on CUDA: the key of a token lies in one piece, and moves wait for the next step that launches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from typing_extensions import override

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cuda.layer_kernels import move
from paceline.engine.kv import KVCache


class CudaKVCache(KVCache):
    """Keys lie [head_dim] after [head_dim], one block beyond those asked for.

    Attributes:
        trash: A slot of that block, where rows write that are only padding.
        layers: Keys and values of each layer as they lie, [blocks, kv_heads, BLOCK_SIZE, head_dim] each.
        moves: By target, the slot that it gets its KV and states from before anything else is written.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        device: torch.device,
        dtype: torch.dtype,
        state_width: int,
    ) -> None:
        """Allocates the cache; contents are zero."""
        self.trash = num_blocks * BLOCK_SIZE
        shape = (num_layers, num_blocks + 1, num_kv_heads, BLOCK_SIZE, head_dim)
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        states = torch.zeros(((num_blocks + 1) * BLOCK_SIZE, state_width), dtype=dtype, device=device)
        super().__init__(keys.transpose(-1, -2), values, states)
        self.layers = list(zip(keys, values, strict=True))
        self.moves: dict[int, int] = {}

    @override
    def apply_moves(self, moves: list[tuple[int, int]]) -> None:
        """Notes pairs of source and target for the next step, and clears the list."""
        # A target is read by moves that came after it: they get what it will get.
        self.moves.update([(target, self.moves.get(source, source)) for source, target in moves])
        moves.clear()

    @property
    def waiting(self) -> tuple[np.ndarray, np.ndarray]:
        """Sources and targets, int64 [n], of the moves that wait."""
        targets, sources = np.array([*self.moves.items()], np.int64).reshape(-1, 2).T
        return sources, targets

    @override
    def states_at(self, slots: Sequence[int]) -> torch.Tensor:
        # States lie where their slots are, or will be.
        return super().states_at([self.moves.get(slot, slot) for slot in slots])

    @override
    def flush(self) -> None:
        if self.moves:
            self.copy_slots(*self.waiting)
            self.moves.clear()

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies KV and states from slot to slot, int64 [n] on the device; all are read before any is written."""
        move(self.keys.transpose(-1, -2), self.values, sources, targets)
        if self.states.shape[1]:
            self.states[targets] = self.states[sources]
