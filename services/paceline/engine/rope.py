"""Rotary position embedding: frequencies as transformers computes them, and tables of cosines and sines.

Knows no model beyond its config. Scalings whose frequencies depend on the longest sequence of a batch are
refused: a row must not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.checkpoints.families import SERVED_SCALINGS
from paceline.core.errors import ConfigError

_CHUNK: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFrequencies:
    """Inverse frequencies [head_dim / 2] and the factor on cosines and sines (YaRN's attention factor)."""

    inverse: tuple[float, ...]
    attention_scaling: float


def rope_frequencies(config: PretrainedConfig, head_dim: int) -> RopeFrequencies:
    """Frequencies of a config, by transformers' own functions (RoPE: Su et al. 2104.09864, eq. 15).

    Raises:
        ConfigError: The scaling is unknown, or depends on the length of the sequence.
    """
    parameters: dict[str, Any] = dict(config.rope_parameters or {})
    kind = parameters.get("rope_type") or "default"
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inverse = 1.0 / (float(parameters["rope_theta"]) ** exponents)
        return RopeFrequencies(inverse=tuple(inverse.tolist()), attention_scaling=1.0)
    if kind not in SERVED_SCALINGS:
        served = sorted(SERVED_SCALINGS)
        raise ConfigError(f"config.json: rope_parameters.rope_type: {kind!r} is not served, one of {served} is")
    try:
        inverse, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json: rope_parameters: {parameters} cannot be computed: {error!r}") from error
    return RopeFrequencies(inverse=tuple(inverse.tolist()), attention_scaling=float(scaling))


class RopeTable:
    """Cosines and sines by position, in chunks of fixed shape: a position always has the same bits."""

    def __init__(self, frequencies: RopeFrequencies) -> None:
        self._inverse = torch.tensor(frequencies.inverse, dtype=torch.float32)
        self._scaling = frequencies.attention_scaling
        half = len(frequencies.inverse)
        self._cos = np.empty((0, half), dtype=np.float32)
        self._sin = np.empty((0, half), dtype=np.float32)
        self._grow_to(1)

    def _grow_to(self, length: int) -> None:
        cosines, sines = [self._cos], [self._sin]
        for first in range(len(self._cos), length, _CHUNK):
            positions = torch.arange(first, first + _CHUNK, dtype=torch.float32)
            angles = positions[:, None] * self._inverse
            cosines.append((angles.cos() * self._scaling).numpy())
            sines.append((angles.sin() * self._scaling).numpy())
        self._cos, self._sin = np.concatenate(cosines), np.concatenate(sines)

    def rows(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Cosines and sines, float32 [rows, head_dim / 2] each, of positions int64 [rows]."""
        highest = int(positions.max(initial=0))
        if highest >= len(self._cos):
            self._grow_to(highest + 1)
        return self._cos[positions], self._sin[positions]
