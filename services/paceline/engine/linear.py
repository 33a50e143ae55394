"""Linear layers over Hugging Face weights, packed for the CPU; knows matrices, no models.

bfloat16 goes through `bfloat16_product` where the CPU multiplies it itself, everything else on a CPU through oneDNN. Of
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

from paceline.engine import bfloat16_product
from paceline.engine.kv import as_array

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
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
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


class Linear:
    """y = x W^T + b with weights in bfloat16 or float32.

    Where oneDNN is missing, and on CUDA, it is torch's own linear: then a row's last bits may depend on the
    other rows. `raw` takes as many rows as `rows_computed` says.

    Attributes:
        dtype: Of the weight, and of what `raw` takes and gives.
        nbytes: Of weight and bias.
        product: What multiplies, where that is our own; else None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Packs weight [out, in] and bias [out]; both may be dropped by the caller afterwards."""
        self.dtype = weight.dtype
        self.out_features, self.in_features = weight.shape
        self.packed = _can_pack(weight)
        self._bias = None if bias is None else bias.to(weight.dtype).contiguous()
        self.nbytes = weight.nbytes + (0 if self._bias is None else self._bias.nbytes)
        self.product: OwnProduct | None = None
        with torch.inference_mode():
            self._weight = weight.contiguous()
            if self.packed and has_own_product(weight.dtype):
                self.product = OwnProduct(self._weight, self._bias)
                self._weight = torch.empty(0, dtype=self.dtype)
            elif self.packed:
                self._weight = _pack_weight(self._weight, PACKED_ROWS)

    def raw(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out] in `dtype`; where `packed`, in inference mode."""
        if self.product is not None:
            return self.product(rows)
        if self.packed:
            result: torch.Tensor = _packed_linear(rows, self._weight, self._bias, "none", [], "")
            return result
        return torch.nn.functional.linear(rows, self._weight, self._bias)

    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, in] -> float32 [rows, out]."""
        count = len(rows)
        if self.packed:
            rows = torch.nn.functional.pad(rows, (0, 0, 0, rows_computed(count, self.dtype) - count))
        return self.raw(rows.to(self.dtype))[:count].to(torch.float32)


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


class HeadLinear:
    """The language model head: like `Linear`, but logits are never rounded to bfloat16.

    bfloat16 logits have 8 bits, so that near-equal tokens would tie and sampling would see steps of 1/16 at
    10. On the CPU bfloat16 weights are kept as float16 instead (exact to 3e-8) and multiplied with float32
    rows by FBGEMM, whose rows are independent of one another from one row up; without FBGEMM, or beyond
    float16's range, as float32.

    Attributes:
        nbytes: Of the weight as kept.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """Packs weight [vocab, hidden]."""
        self._on_cuda = weight.device.type == "cuda"
        self._half: object | None = None
        self._linear: Linear | None = None
        self._weight = weight
        self.nbytes = weight.nbytes
        if self._on_cuda:
            return
        if weight.dtype == torch.bfloat16 and _fits_float16(weight):
            self._half = torch.ops.quantized.linear_prepack_fp16(weight.to(torch.float32), None)
        else:
            self._linear = Linear(weight.to(torch.float32))
            self.nbytes = self._linear.nbytes
        self._weight = weight[:0]

    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, hidden] -> float32 [rows, vocab]."""
        if self._linear is not None:
            return self._linear(rows)
        if self._half is not None:
            logits: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(rows, self._half)
            return logits
        if self._weight.dtype == torch.float32:
            return torch.nn.functional.linear(rows, self._weight)
        return torch.mm(rows.to(self._weight.dtype), self._weight.t(), out_dtype=torch.float32)


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
