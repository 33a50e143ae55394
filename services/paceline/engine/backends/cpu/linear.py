"""Linear layers and heads of the CPU: `Product`s that take and give torch's tensors; they know matrices, no models."""

from __future__ import annotations

import torch
from typing_extensions import override

from paceline.engine.backends.cpu.product import Product
from paceline.engine.layers import Head, Linear


class PackedLinear(Linear):
    """A linear over weight [out, in] and bias [out]; both may be dropped by the caller afterwards.

    Attributes:
        product: Weight and bias, packed.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        with torch.inference_mode():
            self.product = Product(self._weight, self._bias)
        self._weight, self._bias = torch.empty(0, dtype=self.dtype), None

    @override
    def raw(self, rows: torch.Tensor) -> torch.Tensor:
        return self.product(rows, self.dtype)


class PackedHead(Head):
    """A head over weight [vocab, hidden], bfloat16 or float32; rows are float32, and are not rounded."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._product, self.nbytes = Product(weight.detach()), weight.nbytes

    @override
    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows, torch.float32)
