"""Packed linears: right, and the same bits for a row whatever and however many the others are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.engine.backends.cpu.linear import PackedHead, PackedLinear

# Sums longer than a block, odd sizes, and outputs that fill no group.
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
@pytest.mark.usefixtures("threads")
def test_a_row_has_the_same_bits_among_1_to_512_rows(kind, dtype, in_features, out_features):
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


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_bfloat16_layer_rounds_rows_and_results_to_bfloat16_and_nothing_else(in_features, out_features):
    layer, weight, bias, rows = random_layer(PackedLinear, in_features, out_features, torch.bfloat16)
    exact = rows.bfloat16().double() @ weight.double().T + bias.double()
    torch.testing.assert_close(layer(rows).double(), exact, atol=1e-5, rtol=2**-8)
    assert layer(rows).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_a_head_never_rounds_logits_to_bfloat16(dtype, in_features, out_features):
    layer, weight, _, rows = random_layer(PackedHead, in_features, out_features, dtype)
    exact = rows.double() @ weight.double().T
    torch.testing.assert_close(layer(rows).double(), exact, atol=1e-5, rtol=1e-5)


def test_no_rows_give_no_rows():
    for dtype in (torch.bfloat16, torch.float32):
        for kind in (PackedLinear, PackedHead):
            layer, *_ = random_layer(kind, 64, 96, dtype)
            assert layer(torch.empty(0, 64)).shape == (0, 96)


def test_raw_takes_and_gives_the_weights_kind():
    layer, *_ = random_layer(PackedLinear, 64, 96, torch.bfloat16)
    with torch.inference_mode():
        assert layer.raw(torch.zeros(4, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert layer.nbytes == 2 * (64 * 96 + 96)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(70, 33), (260, 64)])
def test_a_packed_head_gives_the_rows_of_its_weight_back_bit_by_bit(dtype, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    head, token_ids = PackedHead(weight), np.random.default_rng(3).integers(0, shape[0], 50)
    assert np.array_equal(head.rows_of(token_ids), weight[torch.from_numpy(token_ids)].float().numpy())
    assert head.packs(weight)
    assert not head.packs(weight.clone())
