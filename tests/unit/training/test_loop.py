"""Muon is torch's, in float32."""

import pytest
import torch
from torch import nn

from training.loop import MOMENTUM, WEIGHT_DECAY, Muon, orthogonal


@pytest.mark.parametrize("shape", [(64, 48), (48, 64), (48, 48)])
def test_muon_does_as_torchs(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    mine, its = [nn.Parameter(torch.ones(shape)) for _ in range(2)]
    ours, theirs = Muon([mine], 0.02), torch.optim.Muon([its], 0.02, weight_decay=WEIGHT_DECAY, momentum=MOMENTUM)
    for _ in range(5):
        mine.grad = torch.randn(shape)
        its.grad = mine.grad.clone()
        ours.step()
        theirs.step()
    moved = (its - 1.0).norm()
    # Theirs computes in bfloat16.
    assert (mine - its).norm() < 0.01 * moved
    assert moved > 0.1


def test_singular_values_end_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(32, 96) * 1e-3))
    assert 0.6 < values.min() <= values.max() < 1.25
