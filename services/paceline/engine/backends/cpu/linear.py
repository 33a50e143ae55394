"""Linear layers and heads of the CPU: `Product`s that take and give torch's tensors; they know matrices, no models."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from paceline.engine.backends.cpu.product import OUTPUTS, Product
from paceline.engine.backends.cpu.simd import LANES
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
        self._packed_from, self._hidden_size = weight.data_ptr(), weight.shape[1]

    def packs(self, weight: torch.Tensor) -> bool:
        """Whether it was made of this very tensor, which has been there ever since."""
        return weight.data_ptr() == self._packed_from

    def rows_of(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Rows of the weight, float32 [tokens, hidden]: the embeddings of tokens where both are one."""
        group, output = np.divmod(token_ids, OUTPUTS)
        words = self._product.weights[group, :, output // LANES, output % LANES]
        if words.dtype == np.uint32:
            words = (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        rows: npt.NDArray[np.float32] = np.ascontiguousarray(words[:, : self._hidden_size])
        return rows

    @override
    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows, torch.float32)
