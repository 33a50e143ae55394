"""The cache of torch operations: the key of a token lies in one piece, to be gathered fast."""

from __future__ import annotations

import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.kv import KVCache


class TorchKVCache(KVCache):
    """Keys lie [head_dim] after [head_dim], one block beyond those asked for.

    Attributes:
        trash_block: One block more than asked for, where rows write that are only padding.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        state_width: int = 0,
    ) -> None:
        """Allocates the cache; contents are zero."""
        self.trash_block = num_blocks
        shape = (num_layers, num_blocks + 1, num_kv_heads, BLOCK_SIZE, head_dim)
        super().__init__(
            keys=torch.zeros(shape, dtype=dtype, device=device).transpose(-1, -2),
            values=torch.zeros(shape, dtype=dtype, device=device),
            states=torch.zeros(((num_blocks + 1) * BLOCK_SIZE, state_width), dtype=dtype, device=device),
        )
