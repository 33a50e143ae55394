"""What decoders are made of: linear layers and heads, rotary position embedding, and the weights of the Llama family.

Linear layers here are as torch has them, whose last bits may depend on the other rows; the CPU packs its own.
Frequencies are those that transformers computes; scalings that depend on the longest sequence of a batch are refused,
since a row must not depend on its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.checkpoints.families import SERVED_SCALINGS
from paceline.core.errors import ConfigError


class Linear:
    """y = x W^T + b with weights in bfloat16 or float32.

    Attributes:
        dtype: Of the weight, and of what `raw` takes and gives.
        nbytes: Of weight and bias.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Takes weight [out, in] and bias [out]."""
        self.dtype = weight.dtype
        self.out_features, self.in_features = weight.shape
        self._bias = None if bias is None else bias.to(weight.dtype).contiguous()
        self.nbytes = weight.nbytes + (0 if self._bias is None else self._bias.nbytes)
        with torch.inference_mode():
            self._weight = weight.contiguous()

    def raw(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out], both of the weight's kind; in inference mode."""
        return torch.nn.functional.linear(rows, self._weight, self._bias)

    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, in] -> float32 [rows, out]."""
        return self.raw(rows.to(self.dtype)).to(torch.float32)


class Head:
    """The language model head: logits are never rounded to bfloat16.

    bfloat16 logits have 8 bits, so that near-equal tokens would tie and sampling would see steps of 1/16 at 10.

    Attributes:
        nbytes: What one step reads of it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Takes weight [vocab, hidden]."""
        # Of bfloat16, torch makes float32 on CUDA only.
        self._weight = weight.to(torch.float32) if weight.device.type == "cpu" else weight
        self.nbytes = self._weight.nbytes

    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, hidden] -> float32 [rows, vocab]."""
        if self._weight.dtype == torch.float32:
            return torch.nn.functional.linear(rows, self._weight)
        return torch.mm(rows.to(self._weight.dtype), self._weight.t(), out_dtype=torch.float32)


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
    if kind not in SERVED_SCALINGS:
        served = sorted(SERVED_SCALINGS)
        raise ConfigError(f"config.json: rope_parameters.rope_type: {kind!r} is not served, one of {served} is")
    try:
        if kind == "default":
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            inverse, scaling = 1.0 / (float(parameters["rope_theta"]) ** exponents), 1.0
        else:
            inverse, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if not (bool(torch.isfinite(inverse).all()) and bool((inverse > 0).all()) and 0 < scaling < math.inf):
            raise ValueError("its frequencies are no positive numbers")
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"config.json: rope_parameters: {parameters} cannot be computed: {error!r}") from error
    return RopeFrequencies(inverse=tuple(inverse.tolist()), attention_scaling=float(scaling))


# pi / 2 in three parts, of which the first two are short enough for exact products; Taylor's coefficients in squares.
_HALF_PI: Final = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_COSINE: Final = [(-1) ** n / math.factorial(2 * n) for n in range(9, -1, -1)]
_SINE: Final = [(-1) ** n / math.factorial(2 * n + 1) for n in range(9, -1, -1)]


def _cos_sin(angles: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines of angles below a million, by IEEE additions and products alone: libraries' differ by CPU."""
    turns = np.rint(angles.astype(np.float64) * (2.0 / math.pi))
    rest = angles.astype(np.float64)
    for part in _HALF_PI:
        rest = rest - turns * part
    square, quarter = rest * rest, turns.astype(np.int64) % 4
    cosine, sine = np.polyval(_COSINE, square), np.polyval(_SINE, square) * rest
    signed = [cosine, sine, -cosine, -sine]
    return (
        np.choose(quarter, [signed[each] for each in (0, 3, 2, 1)]).astype(np.float32),
        np.choose(quarter, [signed[each] for each in (1, 0, 3, 2)]).astype(np.float32),
    )


class RopeTable:
    """Cosines and sines by position, in chunks of fixed shape: a position always has the same bits."""

    def __init__(self, frequencies: RopeFrequencies) -> None:
        self._inverse = np.array(frequencies.inverse, np.float32)
        self._scaling = np.float32(frequencies.attention_scaling)
        half = len(frequencies.inverse)
        self._cos = np.empty((0, half), dtype=np.float32)
        self._sin = np.empty((0, half), dtype=np.float32)
        self._grow_to(1)

    def _grow_to(self, length: int) -> None:
        cosines, sines = [self._cos], [self._sin]
        for first in range(len(self._cos), length, _CHUNK):
            positions = np.arange(first, first + _CHUNK, dtype=np.float32)
            cosine, sine = _cos_sin(positions[:, None] * self._inverse)
            cosines.append(cosine * self._scaling)
            sines.append(sine * self._scaling)
        self._cos, self._sin = np.concatenate(cosines), np.concatenate(sines)

    def rows(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Cosines and sines, float32 [rows, head_dim / 2] each, of positions int64 [rows]."""
        highest = int(positions.max(initial=0))
        if highest >= len(self._cos):
            self._grow_to(highest + 1)
        return self._cos[positions], self._sin[positions]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaLayer:
    """One layer; norms are float32, and the q/k norms [head_dim] are empty where the family has none."""

    input_norm: torch.Tensor
    query_norm: torch.Tensor
    key_norm: torch.Tensor
    post_norm: torch.Tensor
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In the order in which a step runs them."""
        return self.qkv, self.out, self.gate_up, self.down

    @property
    def nbytes(self) -> int:
        """What one step reads of this layer."""
        return sum(linear.nbytes for linear in self.linears)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """All weights of a decoder.

    Attributes:
        embedding: [vocab, hidden].
        final_norm: float32 [hidden].
        head: From final hidden states to logits.
        feature_norm: float32 [hidden], of `Batch.features`, which the first layer takes beside the embedding, both
            normalised; None: it takes the embedding alone.
    """

    embedding: torch.Tensor
    layers: tuple[LlamaLayer, ...]
    final_norm: torch.Tensor
    head: Head
    feature_norm: torch.Tensor | None = None
