"""The compiled loops against numpy and torch."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.backends.cpu.layer_kernels import add_rms_norm_rows, exp32, rms_norm_rows, silu_mul_rows


def bits(tensor):
    return tensor.view(torch.uint16).numpy()


@settings(max_examples=300, deadline=None)
@given(st.floats(-87, 88, width=32))
def test_exp_is_right_to_two_units_in_the_last_place(value):
    exact = np.exp(np.float64(value))
    assert abs(float(exp32(np.float32(value))) - exact) <= 2 * np.spacing(np.float32(exact))


def test_exp_saturates_instead_of_overflowing():
    assert exp32(np.float32(-1e30)) == exp32(np.float32(-87))
    assert np.isfinite(exp32(np.float32(1e30)))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 70), st.integers(1, 4), st.integers(0, 2**32))
def test_rms_norm_adds_the_delta_and_equals_torch(hidden, rows, seed):
    rng = np.random.default_rng(seed)
    residual, delta = (rng.standard_normal((rows, hidden)).astype(np.float32) for _ in range(2))
    weight = rng.standard_normal(hidden).astype(np.float32)
    total = torch.from_numpy(residual + delta)
    expected = torch.nn.functional.rms_norm(total, (hidden,), torch.from_numpy(weight), 1e-5)
    out = np.empty_like(residual)
    add_rms_norm_rows(residual, delta, weight, np.float32(1e-5), out)
    np.testing.assert_array_equal(residual, total.numpy())
    np.testing.assert_allclose(out, expected.numpy(), atol=2e-6, rtol=2e-5)


def test_bfloat16_results_are_rounded_to_the_nearest_as_torch_rounds():
    rng = np.random.default_rng(0)
    residual = rng.standard_normal((3, 4096)).astype(np.float32)
    weight = rng.standard_normal(4096).astype(np.float32)
    exact, rounded = np.empty_like(residual), torch.empty((3, 4096), dtype=torch.bfloat16)
    rms_norm_rows(residual, weight, np.float32(1e-6), exact)
    rms_norm_rows(residual, weight, np.float32(1e-6), bits(rounded))
    assert torch.equal(rounded, torch.from_numpy(exact).bfloat16())


def test_silu_times_up_equals_torch_in_both_kinds():
    both = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 2 * 133)).astype(np.float32) * 8)
    gate, up = both.chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    out = np.empty((3, 133), dtype=np.float32)
    silu_mul_rows(both.numpy(), out)
    np.testing.assert_allclose(out, expected.numpy(), atol=1e-6, rtol=2e-6)
    half = both.bfloat16()
    gate, up = half.float().chunk(2, dim=1)
    rounded = torch.empty((3, 133), dtype=torch.bfloat16)
    silu_mul_rows(bits(half), bits(rounded))
    torch.testing.assert_close(rounded.float(), torch.nn.functional.silu(gate) * up, atol=1e-6, rtol=2**-8)
