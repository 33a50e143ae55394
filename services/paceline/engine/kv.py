"""Paged KV: the memory of keys and values, by physical slot; `core.pages` decides who owns which. Knows no model.

A physical slot is `block * BLOCK_SIZE + offset`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.core.features import Features
from paceline.core.pages import BLOCK_SIZE


class KVCache:
    """Keys and values of all layers, in the kind of the weights; platforms lay them out.

    Attributes:
        keys: [layers, blocks, kv_heads, head_dim, BLOCK_SIZE].
        values: [layers, blocks, kv_heads, BLOCK_SIZE, head_dim].
        states: [slots, width], see `engine.hidden_states`.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, states: torch.Tensor) -> None:
        self.keys, self.values, self.states = keys, values, states
        self.device = keys.device

    @property
    def nbytes(self) -> int:
        """Memory of keys, values and states."""
        return self.keys.nbytes + self.values.nbytes + self.states.nbytes

    def keep_states(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Writes the states [n, width] of slots, int64 [n]."""
        self.states[slots] = states.to(self.states.dtype)

    def features(self, slots: Sequence[int]) -> Features:
        """The states of slots, float32 [n, width]."""
        states: Features = self.states_at(slots).float().cpu().numpy()
        return states

    def state_bytes(self, slots: Sequence[int], width: int) -> bytes:
        """The first `width` numbers of the states of slots, bfloat16, little-endian, a slot after another."""
        states = self.states_at(slots)[:, :width].to(device="cpu", dtype=torch.bfloat16)
        return states.contiguous().view(torch.uint8).numpy().tobytes()

    def states_at(self, slots: Sequence[int]) -> torch.Tensor:
        """The states of slots [n, width], on the device."""
        return self.states[torch.tensor(slots).to(self.device)]

    def apply_moves(self, moves: list[tuple[int, int]]) -> None:
        """Copies KV and states from slot to slot, by pairs of source and target, and clears the list.

        Moves of several commits may name one target, whose page was freed and reserved again: the last one counts.
        """
        if moves:
            last = {target: source for source, target in moves}
            sources, targets = np.array([*last.values()], np.int64), np.array([*last], np.int64)
            self.copy_slots(np.ascontiguousarray(sources), np.ascontiguousarray(targets))
            moves.clear()

    def flush(self) -> None:
        """Does the moves that wait, where they do; code that reads or writes slots calls it first."""

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
        self._copy_kv(sources, targets)

    def _copy_kv(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        source, target = torch.from_numpy(sources).to(self.device), torch.from_numpy(targets).to(self.device)
        from_block, from_offset = source // BLOCK_SIZE, source % BLOCK_SIZE
        to_block, to_offset = target // BLOCK_SIZE, target % BLOCK_SIZE
        self.keys[:, to_block, :, :, to_offset] = self.keys[:, from_block, :, :, from_offset]
        self.values[:, to_block, :, to_offset] = self.values[:, from_block, :, from_offset]
