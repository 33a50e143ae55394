import pytest
import torch
from torch.nn import functional

from training import objective
from training.objective import distillation


@pytest.mark.parametrize("tv_weight", [0.0, 0.3, 1.0])
def test_gradients_equal_those_of_autograd(tv_weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "SLICE_ELEMENTS", 3 * 11)
    generator = torch.Generator().manual_seed(0)
    draft_hidden = torch.randn(7, 5, generator=generator).requires_grad_()
    draft_head = torch.randn(11, 5, generator=generator).requires_grad_()
    target_hidden = torch.randn(7, 6, generator=generator)
    target_head = torch.randn(11, 6, generator=generator)
    temperatures = torch.linspace(0.4, 1.0, 7)
    result = distillation(
        draft_hidden.detach(), draft_head.detach(), target_hidden, target_head, temperatures, tv_weight
    )
    scale = temperatures.unsqueeze(1)
    draft_log = torch.log_softmax(draft_hidden @ draft_head.T / scale, dim=-1)
    target = torch.softmax(target_hidden @ target_head.T / scale, dim=-1)
    kl = functional.kl_div(draft_log, target, reduction="batchmean")
    tv = (draft_log.exp() - target).abs().sum(dim=-1).mean() / 2
    loss = (1 - tv_weight) * kl + tv_weight * tv
    loss.backward()
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert draft_hidden.grad is not None
    assert draft_head.grad is not None
    torch.testing.assert_close(result.grad_hidden, draft_hidden.grad)
    torch.testing.assert_close(result.grad_head, draft_head.grad)


def test_equal_models_have_no_loss_and_no_gradient() -> None:
    hidden, head = torch.randn(4, 5), torch.randn(9, 5)
    result = distillation(hidden, head, hidden, head, torch.ones(4), 0.5)
    assert result.loss == pytest.approx(0.0, abs=1e-6)
    assert result.agreement == 1.0
    assert result.grad_hidden.abs().max() < 1e-6
