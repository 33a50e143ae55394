"""What Triton's interpreter gets wrong is mended: without that, the other tests here would prove nothing."""

from __future__ import annotations

import torch
import triton.language as tl

from paceline.engine.backends.cuda.launch import kernel, launch
from tests.unit.engine.cuda.interpreted import DEVICE


@kernel
def _count(bound, out):
    count = 0
    for _ in range(0, tl.load(bound), 2):
        count += 1
    tl.store(out, count)


@kernel
def _multiply(left, right, out):
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + at, tl.dot(tl.load(left + at), tl.load(right + at)))


def test_loops_run_to_a_bound_that_is_read_from_memory() -> None:
    out = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    launch(_count, (1,), torch.tensor([9], dtype=torch.int32, device=DEVICE), out)
    assert out.item() == 5


def test_products_of_bfloat16_are_those_of_numbers() -> None:
    left, right = torch.randn((2, 16, 16), device=DEVICE).bfloat16()
    out = torch.empty((16, 16), device=DEVICE)
    launch(_multiply, (1,), left, right, out)
    torch.testing.assert_close(out, left.float() @ right.float())
