"""What kernels compute for noise and masses has the bits of the readable reference."""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl

from paceline.core.noise import BLOCK
from paceline.core.params import SamplingParams
from paceline.core.processors import Truncation
from paceline.engine.backends.cuda.arithmetic import (
    EXACT,
    block_noise,
    in_units,
    mass_of_blocks,
    order_of,
    share,
    value_of,
)
from paceline.engine.backends.cuda.launch import kernel, launch
from tests.support.reference_sampling import gumbel, mass_of_all, masses_of
from tests.support.reference_sampling import in_units as reference_units
from tests.unit.engine.cuda.interpreted import DEVICE

BLOCKS = 4


@kernel
def _noise(seed, position, out, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCKS) * 3
    noise = block_noise(block, tl.load(seed), tl.load(position), BLOCKS)
    tl.store(out + tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], noise)


@kernel
def _masses(logits, scale, units, total, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCKS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(logits + at)
    shares = share(value, tl.max(tl.max(value, 1), 0), tl.load(scale))
    tl.store(units + at, in_units(shares))
    tl.store(total, tl.sum(mass_of_blocks(shares, BLOCKS), 0))


@kernel
def _there_and_back(values, orders, back, N: tl.constexpr):
    at = tl.arange(0, N)
    order = order_of(tl.load(values + at))
    tl.store(orders + at, order)
    tl.store(back + at, value_of(order))


def on_device(values: object) -> torch.Tensor:
    return torch.from_numpy(np.array(values)).to(DEVICE)


def test_noise_has_the_bits_of_the_reference_for_any_seed_and_position() -> None:
    rng = np.random.default_rng(3)
    ids = (np.arange(BLOCKS)[:, None] * 3 * BLOCK + np.arange(BLOCK)).ravel()
    for seed, position in [(0, 0), (2**64 - 1, 2**40 + 7), *rng.integers(0, 2**62, (4, 2)).tolist()]:
        out = torch.empty(BLOCKS * BLOCK, dtype=torch.float64, device=DEVICE)
        words = on_device(np.array([seed], np.uint64).view(np.int64)), on_device(np.array([position], np.int64))
        launch(_noise, (1,), *words, out, BLOCKS=BLOCKS, BLOCK=BLOCK, **EXACT)
        np.testing.assert_array_equal(out.cpu(), gumbel(seed, position, ids))


def test_masses_have_the_bits_of_the_reference() -> None:
    rng = np.random.default_rng(4)
    for temperature in (0.3, 1.0, 2.7):
        rule = Truncation.of(SamplingParams(max_tokens=1, temperature=temperature))
        logits = (rng.standard_normal(BLOCKS * BLOCK) * 5).astype(np.float32)
        logits[7], logits[9] = -np.inf, -3e38
        units = torch.empty(len(logits), dtype=torch.int64, device=DEVICE)
        total = torch.empty(1, dtype=torch.int64, device=DEVICE)
        scale = on_device(np.array([rule.inverse_temperature], np.float32))
        launch(_masses, (1,), on_device(logits), scale, units, total, BLOCKS=BLOCKS, BLOCK=BLOCK, **EXACT)
        shares = masses_of(logits, logits.max(), rule)
        np.testing.assert_array_equal(units.cpu(), reference_units(shares))
        assert total.item() == mass_of_all(shares)


def test_float32_and_whole_numbers_have_one_order() -> None:
    values = np.array([-np.inf, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 0.5, 1.0, 3e38, np.inf], np.float32)
    values = np.append(values, np.full(16 - len(values), np.inf, np.float32))
    orders, back = torch.empty(16, dtype=torch.int64, device=DEVICE), torch.empty(16, device=DEVICE)
    launch(_there_and_back, (1,), on_device(values), orders, back, N=16)
    assert np.all(np.diff(orders.cpu().numpy())[:10] > 0)
    np.testing.assert_array_equal(back.cpu().numpy().view(np.int32), values.view(np.int32))
