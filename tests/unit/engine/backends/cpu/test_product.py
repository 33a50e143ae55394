"""The product: that of the numbers, and the same bits by every instruction that the CPU has for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.engine.backends.cpu import product
from paceline.engine.backends.cpu.product import OUTPUTS, TILE_ROWS, Product, as_floats, as_pairs
from paceline.engine.backends.cpu.simd import FEATURES, FUSES

HAS_PAIRS = "+avx512bf16" in FEATURES


def random_bits(generator, shape):
    """Bits of bfloat16 numbers of all the magnitudes that weights and activations have."""
    values = generator.standard_normal(shape) * 2.0 ** generator.integers(-20, 20, shape)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def numbers(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def packed(bits):
    return Product(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)).weights


def sums(inputs, weights, start):
    """float32 [groups, rows * OUTPUTS], begun at `start`."""
    totals = np.full((len(weights), len(inputs) * OUTPUTS), start, np.float32)
    for group in range(len(weights)):
        product._multiply_group(inputs, weights, group, totals[group])
    return totals


def added_in_order(rows, weight):
    """float32 [rows, out], odd inputs before even ones: every product is exact in float64, every sum rounded once."""
    totals = np.zeros((len(rows), len(weight)), np.float32)
    for first in range(0, rows.shape[1], 2):
        for index in (first + 1, first):
            if index < rows.shape[1]:
                exact = rows[:, None, index].astype(np.float64) * weight[None, :, index].astype(np.float64)
                totals = (totals.astype(np.float64) + exact).astype(np.float32)
    return totals


@pytest.mark.parametrize("rows", [1, 2, 3, TILE_ROWS, TILE_ROWS + 1, 40])
@pytest.mark.parametrize(("in_features", "out_features"), [(30, 32), (769, 96), (2050, 70)])
def test_sums_of_bfloat16_have_the_bits_of_additions_in_order(rows, in_features, out_features):
    # Of small whole numbers and halves, so that float64 holds each sum before it is rounded.
    generator = np.random.default_rng(rows)
    weight = numbers(random_bits(generator, (out_features, in_features)))
    inputs = numbers(random_bits(generator, (rows, in_features)))
    weight, inputs = (np.clip(np.round(each * 64), -128, 128).astype(np.float32) for each in (weight, inputs))
    weight[:, ::7] *= np.float32(2.0**12)
    bits = [(each.view(np.uint32) >> 16).astype(np.uint16) for each in (weight, inputs)]
    assert all(np.array_equal(numbers(has), each) for has, each in zip(bits, (weight, inputs), strict=True))
    weights = packed(bits[0])
    found = sums(as_floats(bits[1], 2 * weights.shape[1]), weights, 0.0)
    in_order = found.reshape(-1, rows, OUTPUTS).transpose(1, 0, 2).reshape(rows, -1)[:, :out_features]
    expected = added_in_order(inputs, weight)
    assert np.array_equal(in_order.view(np.uint32), expected.view(np.uint32))
    swapped = added_in_order(inputs[:, ::-1], weight[:, ::-1])
    assert in_features < 100 or not np.array_equal(swapped, expected), "another order would be seen"


@pytest.mark.skipif(not HAS_PAIRS, reason="this CPU has no instruction for pairs of bfloat16")
@pytest.mark.parametrize("rows", [1, 2, TILE_ROWS, TILE_ROWS + 1, 40])
@pytest.mark.parametrize(("in_features", "out_features"), [(30, 32), (768, 96), (2050, 70)])
def test_the_instruction_for_pairs_gives_the_same_bits(rows, in_features, out_features):
    generator = np.random.default_rng(rows)
    weights = packed(random_bits(generator, (out_features, in_features)))
    inputs = random_bits(generator, (rows, in_features))
    by_pairs = sums(as_pairs(inputs, weights.shape[1]), weights, 0.5)
    one_by_one = sums(as_floats(inputs, 2 * weights.shape[1]), weights, 0.5)
    assert np.array_equal(by_pairs.view(np.uint32), one_by_one.view(np.uint32))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_the_product_is_that_of_the_numbers(kind):
    generator = np.random.default_rng(3)
    weight, rows = (
        torch.from_numpy(numbers(random_bits(generator, shape))).to(kind).float() for shape in ((70, 129), (5, 129))
    )
    found = Product(weight.to(kind))(rows.to(kind), torch.float32).double()
    largest = rows.double().abs() @ weight.double().abs().T
    assert torch.all((found - rows.double() @ weight.double().T).abs() <= 129 * 2.0**-24 * largest)


@pytest.mark.skipif(not FUSES, reason="this CPU rounds products before it adds them")
def test_float32_products_are_rounded_once():
    # 1 + 2^-12 squared is 1 + 2^-11 + 2^-24, of which float32 loses the last part unless it is added unrounded.
    almost = torch.full((1, 1), 1.0 + 2.0**-12)
    result = Product(almost, torch.tensor([-1.0 - 2.0**-11]))(almost, torch.float32)
    assert result.item() == 2.0**-24
