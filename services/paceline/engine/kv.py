"""Paged KV: the memory of keys and values, by physical slot; `core.pages` decides who owns which. Knows no model.

A physical slot is `block * BLOCK_SIZE + offset`. Keys of a block lie transposed, [head_dim, BLOCK_SIZE], so
that the score loop runs over tokens side by side without changing the order of any sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.kernel_cache import njit


@njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _copy_slots(keys: Any, values: Any, sources: Any, targets: Any) -> None:
    layers, _, kv_heads, head_dim, block_size = keys.shape
    count = sources.shape[0]
    held_keys = np.empty((count, kv_heads, head_dim), keys.dtype)
    held_values = np.empty((count, kv_heads, head_dim), keys.dtype)
    for layer in range(layers):
        for index in range(count):
            block, offset = sources[index] // block_size, sources[index] % block_size
            held_keys[index] = keys[layer, block, :, :, offset]
            held_values[index] = values[layer, block, :, offset, :]
        for index in range(count):
            block, offset = targets[index] // block_size, targets[index] % block_size
            keys[layer, block, :, :, offset] = held_keys[index]
            values[layer, block, :, offset, :] = held_values[index]


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A CPU tensor's memory for the compiled loops; bfloat16 shows as its bits, uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class KVCache:
    """Keys and values of all layers for `num_blocks` blocks, in the kind of the weights.

    Attributes:
        keys: [layers, blocks, kv_heads, head_dim, BLOCK_SIZE].
        values: [layers, blocks, kv_heads, BLOCK_SIZE, head_dim].
        states: [slots, width], see `engine.states`.
        layers: One (keys, values) pair of numpy views a layer on the CPU, empty elsewhere.
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
        """Allocates the cache; contents are zero, so that unused lanes never hold NaN."""
        self.device = torch.device(device)
        self.num_blocks = num_blocks
        shape = (num_layers, num_blocks, num_kv_heads)
        self.keys = torch.zeros((*shape, head_dim, BLOCK_SIZE), dtype=dtype, device=self.device)
        self.values = torch.zeros((*shape, BLOCK_SIZE, head_dim), dtype=dtype, device=self.device)
        self.states = torch.zeros((num_blocks * BLOCK_SIZE, state_width), dtype=dtype, device=self.device)
        self.layers: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
        if self.device.type == "cpu":
            self.layers = list(zip(as_array(self.keys), as_array(self.values), strict=True))

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and states."""
        return self.keys.nbytes + self.values.nbytes + self.states.nbytes

    def keep_states(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Writes the states [n, width] of slots, int64 [n]."""
        self.states[slots] = states.to(self.states.dtype)

    def copy_slots(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copies KV and states of slots in all layers; all sources are read before any target is written.

        Args:
            sources: int64 [n].
            targets: int64 [n], distinct.
        """
        if len(sources) == 0:
            return
        if self.states.shape[1]:
            moved = torch.from_numpy(sources).to(self.device)
            self.states[torch.from_numpy(targets).to(self.device)] = self.states[moved]
        if self.layers:
            _copy_slots(as_array(self.keys), as_array(self.values), sources, targets)
        else:
            self._copy_in_torch(torch.from_numpy(sources).to(self.device), torch.from_numpy(targets).to(self.device))

    def _copy_in_torch(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        from_block, from_offset = sources // BLOCK_SIZE, sources % BLOCK_SIZE
        to_block, to_offset = targets // BLOCK_SIZE, targets % BLOCK_SIZE
        self.keys[:, to_block, :, :, to_offset] = self.keys[:, from_block, :, :, from_offset]
        self.values[:, to_block, :, to_offset] = self.values[:, from_block, :, from_offset]
