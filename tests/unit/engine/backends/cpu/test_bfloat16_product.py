"""The two ways to multiply bfloat16: the CPU's own instruction and fused multiply-adds give the same bits."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.engine.backends.cpu import bfloat16_product
from paceline.engine.backends.cpu.bfloat16_product import OUTPUTS, TILE_ROWS, pack

pytestmark = pytest.mark.skipif(not bfloat16_product.is_supported(), reason="this CPU does not multiply bfloat16")


def random_bits(generator, shape):
    """Bits of bfloat16 numbers of all the magnitudes that weights and activations have."""
    values = generator.standard_normal(shape) * 2.0 ** generator.integers(-20, 20, shape)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def sums(inputs, weights, start):
    """float32 [groups, rows * OUTPUTS], begun at `start`."""
    totals = np.full((len(weights), len(inputs) * OUTPUTS), start, np.float32)
    for group in range(len(weights)):
        bfloat16_product._multiply_group(inputs, weights, group, totals[group])
    return totals


@pytest.mark.parametrize("rows", [1, 2, TILE_ROWS, TILE_ROWS + 1, 40])
@pytest.mark.parametrize(("in_features", "out_features"), [(30, 32), (768, 96), (2050, 70)])
def test_either_way_gives_the_same_bits(rows, in_features, out_features):
    generator = np.random.default_rng(rows)
    weights = pack(random_bits(generator, (out_features, in_features)))
    words = random_bits(generator, (rows, in_features)).view(np.uint32)
    by_pairs = sums(words, weights, 0.5)
    one_by_one = sums(bfloat16_product._as_floats(words), weights, 0.5)
    assert np.array_equal(by_pairs.view(np.uint32), one_by_one.view(np.uint32))
    # Another order of the two products in a word would be seen: numbers differ enough for sums to round.
    swapped = ((words >> 16) | (words << 16)).view(np.uint32)
    other_weights = ((weights >> 16) | (weights << 16)).view(np.uint32)
    assert not np.array_equal(sums(swapped, other_weights, 0.5), by_pairs)


@pytest.mark.parametrize("by_pairs", [True, False])
def test_the_product_is_that_of_the_numbers(by_pairs):
    generator = np.random.default_rng(3)
    weight, rows = random_bits(generator, (64, 128)), random_bits(generator, (5, 128))
    words = rows.view(np.uint32)
    found = sums(words if by_pairs else bfloat16_product._as_floats(words), pack(weight), 0.0)

    def numbers(bits):
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)

    exact = numbers(rows) @ numbers(weight).T
    largest = np.abs(numbers(rows)) @ np.abs(numbers(weight)).T
    in_order = found.reshape(2, 5, OUTPUTS).transpose(1, 0, 2).reshape(5, 64)
    assert np.all(np.abs(in_order - exact) <= 128 * 2.0**-24 * largest)
