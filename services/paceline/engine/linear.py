"""Linear layers and heads as torch has them, whose last bits may depend on the other rows; the CPU packs its own."""

from __future__ import annotations

import torch


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
        """[rows, in] -> [rows, out] of as many rows as `rows_computed` says; in inference mode."""
        return torch.nn.functional.linear(rows, self._weight, self._bias)

    def rows_computed(self, count: int) -> int:
        """Rows that `raw` takes for `count` rows."""
        return count

    @torch.inference_mode()
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [rows, in] -> float32 [rows, out]."""
        count = len(rows)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, self.rows_computed(count) - count))
        return self.raw(rows.to(self.dtype))[:count].to(torch.float32)


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
