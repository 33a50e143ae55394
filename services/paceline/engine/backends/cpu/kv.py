"""The cache of the compiled loops.

Keys of a block lie transposed, [head_dim, BLOCK_SIZE], so that the score loop runs over tokens side by side without
changing the order of any sum.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.kv import KVCache
from paceline.kernel_cache import kernel


@kernel
def _copy_slots(keys: Any, values: Any, sources: Any, targets: Any) -> None:
    layers, _, kv_heads, head_dim, block_size = keys.shape
    count = sources.shape[0]
    held_keys = np.empty((count, kv_heads, head_dim), keys.dtype)
    held_values = np.empty((count, kv_heads, head_dim), keys.dtype)
    # Element by element: numba takes seconds to compile the message of an assignment of arrays that do not fit.
    for layer in range(layers):
        for index in range(count):
            block, offset = sources[index] // block_size, sources[index] % block_size
            for head in range(kv_heads):
                for dim in range(head_dim):
                    held_keys[index, head, dim] = keys[layer, block, head, dim, offset]
                    held_values[index, head, dim] = values[layer, block, head, offset, dim]
        for index in range(count):
            block, offset = targets[index] // block_size, targets[index] % block_size
            for head in range(kv_heads):
                for dim in range(head_dim):
                    keys[layer, block, head, dim, offset] = held_keys[index, head, dim]
                    values[layer, block, head, offset, dim] = held_values[index, head, dim]


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A CPU tensor's memory for the compiled loops; bfloat16 shows as its bits, uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory page by page, when these are first written.

    Memory of huge pages, as NumPy asks for, comes 2 MiB at a time: in each layer, for a session of 16 tokens.
    """
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    room = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Systems without huge pages refuse to do without them.
    with suppress(AttributeError, OSError):
        room.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(room, dtype=dtype, count=count).view(shape)


class CpuKVCache(KVCache):
    """Keys and values as numpy views for the compiled loops.

    Attributes:
        layers: One (keys, values) pair of numpy views a layer.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        dtype: torch.dtype = torch.float32,
        state_width: int = 0,
    ) -> None:
        """Sets room aside; contents are zero, so that unused lanes never hold NaN."""
        shape = (num_layers, num_blocks, num_kv_heads)
        super().__init__(
            keys=lazy_zeros((*shape, head_dim, BLOCK_SIZE), dtype=dtype),
            values=lazy_zeros((*shape, BLOCK_SIZE, head_dim), dtype=dtype),
            states=lazy_zeros((num_blocks * BLOCK_SIZE, state_width), dtype=dtype),
        )
        self.layers = list(zip(as_array(self.keys), as_array(self.values), strict=True))

    def _copy_kv(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        _copy_slots(as_array(self.keys), as_array(self.values), sources, targets)
