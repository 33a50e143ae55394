"""Linear layers packed for the CPU; knows matrices, no models.

bfloat16 goes through `bfloat16_product` where the CPU multiplies it itself, everything else through oneDNN. Of
the latter was measured on the reference machine with torch 2.13: from two rows up, a row of a layer packed for 64 rows
has the same bits whatever the other rows are and however many, in bfloat16 and float32, with one thread and with two. A
lone row takes another kernel that differs once a sum is longer than 1,024. One to three rows are
computed as the first of four: with so short a dot product in flight the kernels of one and two rows are
bound by latency, and take 1.2 to 1.35 times as long as four rows do.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from typing_extensions import override

from paceline.engine.backends.cpu import bfloat16_product
from paceline.engine.backends.cpu.kv import as_array
from paceline.engine.layers import Head, Linear

# oneDNN's packed layout is reachable through torch's private operators only (inductor uses the same).
_can_use_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
_pack_weight = torch.ops.mkldnn._reorder_linear_weight  # noqa: SLF001
_packed_linear = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001

PACKED_ROWS: Final = 64
MIN_ROWS: Final = 4
# Few different numbers of rows: oneDNN compiles, and keeps, a primitive of about half a megabyte for each.
_ROW_STEPS: Final = ((64, 4), (256, 16))
_LARGE_STEP: Final = 64


def rows_computed(count: int, dtype: torch.dtype) -> int:
    """Rows that a packed linear of this kind computes for so many."""
    return count if has_own_product(dtype) else padded_rows(count)


def padded_rows(count: int) -> int:
    """Rows that oneDNN computes for so many: the next multiple of 4, from 65 of 16, from 257 of 64."""
    step = next((step for limit, step in _ROW_STEPS if count <= limit), _LARGE_STEP)
    return max(MIN_ROWS, -(-count // step) * step)


def _can_pack(weight: torch.Tensor) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or bool(_can_use_bf16())


def has_own_product(dtype: torch.dtype) -> bool:
    """Says whether linears of this kind go through `bfloat16_product` on this CPU."""
    return dtype == torch.bfloat16 and has_native_bfloat16() and bfloat16_product.is_supported()


def row_counts(limit: int, dtype: torch.dtype) -> list[int]:
    """Every number of rows for which packed linears of this kind compile something in steps of up to `limit` rows."""
    if has_own_product(dtype):
        return [1]
    counts = [padded_rows(1)]
    while counts[-1] < limit:
        counts.append(padded_rows(counts[-1] + 1))
    return counts


class PackedLinear(Linear):
    """A linear over weight [out, in] and bias [out]; both may be dropped by the caller afterwards.

    Where oneDNN is missing, it is torch's own linear: then a row's last bits may depend on the other rows.

    Attributes:
        product: What multiplies, where that is our own; else None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._packed = _can_pack(weight)
        self.product: OwnProduct | None = None
        with torch.inference_mode():
            if self._packed and has_own_product(weight.dtype):
                self.product = OwnProduct(self._weight, self._bias)
                self._weight = torch.empty(0, dtype=self.dtype)
            elif self._packed:
                self._weight = _pack_weight(self._weight, PACKED_ROWS)

    @override
    def rows_computed(self, count: int) -> int:
        return rows_computed(count, self.dtype) if self._packed else count

    @override
    def raw(self, rows: torch.Tensor) -> torch.Tensor:
        if self.product is not None:
            return self.product(rows)
        if self._packed:
            result: torch.Tensor = _packed_linear(rows, self._weight, self._bias, "none", [], "")
            return result
        return super().raw(rows)


class OwnProduct:
    """Weight [out, in] and bias [out] for `bfloat16_product`.

    Attributes:
        words: The weight as `bfloat16_product.pack` leaves it.
        bias: float32, filled up with zeros to whole groups of outputs.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._inputs_are_odd = weight.shape[1] % 2 == 1
        self._outputs = weight.shape[0]
        self.words = bfloat16_product.pack(as_array(weight))
        self.bias = np.zeros(bfloat16_product.OUTPUTS * len(self.words), np.float32)
        if bias is not None:
            self.bias[: len(bias)] = bias.to(torch.float32).numpy()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """bfloat16 [rows, in] -> bfloat16 [rows, out]."""
        if self._inputs_are_odd:
            rows = torch.nn.functional.pad(rows, (0, 1))
        out = torch.empty((len(rows), self._outputs), dtype=torch.bfloat16)
        bfloat16_product.multiply(as_array(rows.contiguous()).view(np.uint32), self.words, self.bias, as_array(out))
        return out


class PackedHead(Head):
    """A head whose weights are packed once.

    bfloat16 weights are kept as float16 (exact to 3e-8) and multiplied with float32 rows by FBGEMM, whose rows are
    independent of one another from one row up; without FBGEMM, or beyond float16's range, as float32.

    Attributes:
        nbytes: Of the weight as kept.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Packs weight [vocab, hidden]."""
        self._half: object | None = None
        if weight.dtype == torch.bfloat16 and _fits_float16(weight):
            self._half = torch.ops.quantized.linear_prepack_fp16(weight.to(torch.float32), None)
            self.nbytes = weight.nbytes
        else:
            self._linear = PackedLinear(weight.to(torch.float32))
            self.nbytes = self._linear.nbytes

    @override
    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._half is None:
            return self._linear(rows)
        logits: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self._half)
        return logits


def _fits_float16(weight: torch.Tensor) -> bool:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    return bool(weight.abs().max() < torch.finfo(torch.float16).max)


def has_native_bfloat16() -> bool:
    """Says whether the CPU multiplies bfloat16 itself.

    Where it does not, oneDNN emulates it: five times slower than here was measured, and with several threads the last
    bits of a row were seen to depend on how many rows there are.
    """
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())  # noqa: SLF001 - no other way
