"""Packed linears: right, and the same bits for a row whatever and however many the others are."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.backends.cpu import linear
from paceline.engine.backends.cpu.linear import (
    MIN_ROWS,
    PackedHead,
    PackedLinear,
    has_native_bfloat16,
    padded_rows,
    row_counts,
    rows_computed,
)

# Sums longer than 1,024 are where oneDNN's kernel for a lone row parts from the others; odd sizes have tails.
SHAPES = [(64, 96), (100, 37), (1027, 130), (2304, 64)]
ROW_COUNTS = [*range(1, 35), 63, 64, 65, 100, 127, 128, 129, 200, 256, 300, 511, 512]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random_layer(kind, in_features, out_features, dtype):
    generator = torch.Generator().manual_seed(5)
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype)
    layer = PackedLinear(weight, bias) if kind is PackedLinear else PackedHead(weight)
    return layer, weight, bias, torch.randn(512, in_features, generator=generator)


@pytest.mark.parametrize("kind", [PackedLinear, PackedHead])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_row_has_the_same_bits_among_1_to_512_rows(threads, kind, dtype, in_features, out_features):
    if dtype is torch.bfloat16 and threads > 1 and not has_native_bfloat16():
        pytest.skip("this CPU emulates bfloat16, and services warn of it")
    layer, _, _, rows = random_layer(kind, in_features, out_features, dtype)
    whole = layer(rows)
    for count in ROW_COUNTS:
        assert torch.equal(layer(rows[:count]), whole[:count]), f"{count} rows"
        assert torch.equal(layer(rows[-count:]), whole[-count:]), f"last {count} rows"
    for index in range(0, 512, 7):
        assert torch.equal(layer(rows[index : index + 1])[0], whole[index]), f"row {index} alone"


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_float32_layers_equal_the_exact_product(in_features, out_features):
    layer, weight, bias, rows = random_layer(PackedLinear, in_features, out_features, torch.float32)
    exact = rows.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(layer(rows).double(), exact, atol=1e-5, rtol=1e-5)


def test_a_bfloat16_layer_rounds_rows_and_results_to_bfloat16_and_nothing_else():
    layer, weight, bias, rows = random_layer(PackedLinear, 96, 64, torch.bfloat16)
    exact = rows.bfloat16().double() @ weight.double().T + bias.double()
    torch.testing.assert_close(layer(rows).double(), exact, atol=0, rtol=2**-8)
    assert layer(rows).dtype == torch.float32


@pytest.mark.skipif(not has_native_bfloat16(), reason="this CPU emulates bfloat16: there is one product only")
def test_our_bfloat16_product_is_onednns_but_for_the_order_of_sums(monkeypatch):
    ours, weight, bias, rows = random_layer(PackedLinear, 1027, 130, torch.bfloat16)
    monkeypatch.setattr(linear, "has_own_product", lambda dtype: False)
    theirs = PackedLinear(weight, bias)
    assert rows_computed(5, torch.bfloat16) == 8
    torch.testing.assert_close(ours(rows), theirs(rows), atol=2**-8, rtol=2**-7)


def test_a_head_never_rounds_logits_to_bfloat16():
    layer, weight, _, rows = random_layer(PackedHead, 320, 200, torch.bfloat16)
    exact = rows.double() @ weight.double().T
    torch.testing.assert_close(layer(rows).double(), exact, atol=1e-5, rtol=1e-5)


def test_a_head_beyond_the_range_of_float16_is_kept_as_float32():
    weight = torch.tensor([[1e6, 0.0], [0.0, 1.0]]).bfloat16()
    logits = PackedHead(weight)(torch.tensor([[1.0, 2.0]]))
    assert logits.tolist() == [[float(weight[0, 0]), 2.0]]


def test_no_rows_give_no_rows():
    for dtype in (torch.bfloat16, torch.float32):
        for kind in (PackedLinear, PackedHead):
            layer, *_ = random_layer(kind, 64, 96, dtype)
            assert layer(torch.empty(0, 64)).shape == (0, 96)


def test_raw_takes_and_gives_the_weights_kind():
    layer, *_ = random_layer(PackedLinear, 64, 96, torch.bfloat16)
    with torch.inference_mode():
        assert layer.raw(torch.zeros(MIN_ROWS, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert layer.nbytes == 2 * (64 * 96 + 96)


def test_rows_are_padded_to_few_different_counts():
    assert [padded_rows(count) for count in (1, 4, 5, 64, 65, 256, 257)] == [4, 4, 8, 64, 80, 256, 320]
    counts = row_counts(512, torch.float32)
    assert counts == sorted({rows_computed(count, torch.float32) for count in range(1, 513)})
    assert len(counts) == 32
