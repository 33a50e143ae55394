"""The distillation loss with its gradients, computed in slices that stay in the cache.

Acceptance at temperature 1 is `1 - TV(target, draft)` for the best rule, so the loss has a total
variation part; the Kullback-Leibler part gives a gradient where the two hardly overlap. Written out
by hand because autograd over `[tokens, vocab]` floats keeps half a dozen copies of them.
"""

from dataclasses import dataclass

import torch

SLICE_ELEMENTS, LEAST_SLICE = 1 << 20, 64
"""A slice of fewer tokens would read a head of 151,936 ids from memory for each few of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationResult:
    """Means over tokens, and gradients of the mean loss.

    `grad_hidden` is `[tokens, hidden]`, `grad_head` is `[vocab, hidden]`; `agreement` is the share
    of tokens where both models have the same most likely id. `grad_head` is None for a frozen head.
    """

    loss: float
    kl: float
    tv: float
    agreement: float
    grad_hidden: torch.Tensor
    grad_head: torch.Tensor | None


@torch.no_grad()
def distillation(
    draft_hidden: torch.Tensor,
    draft_head: torch.Tensor,
    target_hidden: torch.Tensor,
    target_head: torch.Tensor,
    temperatures: torch.Tensor,
    tv_weight: float,
    matmul_dtype: torch.dtype = torch.float32,
    head_learns: bool = True,
) -> DistillationResult:
    """Mean of `(1 - tv_weight) * KL(target || draft) + tv_weight * TV` at each token's temperature.

    Args:
        draft_hidden: `[tokens, draft hidden]`.
        draft_head: `[vocab, draft hidden]`.
        target_hidden: `[tokens, target hidden]`.
        target_head: `[vocab, target hidden]`.
        temperatures: `[tokens]`, above 0; both distributions are taken at it.
        tv_weight: in [0, 1].
        matmul_dtype: of the two gradient products; logits are always float32.
        head_learns: whether the draft head's gradient is wanted.
    """
    tokens, vocab = draft_hidden.shape[0], draft_head.shape[0]
    draft_head, target_head = draft_head.float(), target_head.float()
    low_head = draft_head.to(matmul_dtype)
    grad_hidden = torch.empty_like(draft_hidden, dtype=torch.float32)
    grad_head = torch.zeros_like(draft_head) if head_learns else None
    sums = torch.zeros(3, dtype=torch.float64)
    size = max(LEAST_SLICE, SLICE_ELEMENTS // vocab)
    for start in range(0, tokens, size):
        part = slice(start, min(tokens, start + size))
        hidden = draft_hidden[part].float()
        grad_logits, found = _slice_gradient(
            hidden @ draft_head.T,
            target_hidden[part].float() @ target_head.T,
            temperatures[part].unsqueeze(1),
            tv_weight,
        )
        sums += found
        low_grad = (grad_logits / tokens).to(matmul_dtype)
        grad_hidden[part] = (low_grad @ low_head).float()
        if grad_head is not None:
            grad_head += (low_grad.T @ hidden.to(matmul_dtype)).float()
    kl, tv, agreement = (sums / tokens).tolist()
    return DistillationResult(
        loss=(1 - tv_weight) * kl + tv_weight * tv,
        kl=kl,
        tv=tv,
        agreement=agreement,
        grad_hidden=grad_hidden,
        grad_head=grad_head,
    )


def _slice_gradient(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    temperatures: torch.Tensor,
    tv_weight: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of the summed loss in the draft logits, and the sums of KL, TV and agreement.

    With `s = sign(draft - target) / 2`, d TV / d logits is `draft * (s - sum(s * draft))`, and
    d KL / d logits is `draft - target`; both over the temperature.
    """
    same = draft_logits.argmax(dim=-1) == target_logits.argmax(dim=-1)
    draft_log = torch.log_softmax(draft_logits / temperatures, dim=-1)
    target_log = torch.log_softmax(target_logits / temperatures, dim=-1)
    draft_probs, target_probs = draft_log.exp(), target_log.exp()
    difference = draft_probs - target_probs
    kl = (target_probs * target_log.sub_(draft_log)).sum()
    tv = difference.abs().sum() / 2
    half_sign = difference.sign().mul_(0.5)
    mean_sign = (half_sign * draft_probs).sum(dim=-1, keepdim=True)
    grad = difference.mul_(1 - tv_weight)
    grad += draft_probs.mul_(half_sign.sub_(mean_sign)).mul_(tv_weight)
    sums = torch.stack([kl, tv, same.sum().float()]).double().cpu()
    return grad.div_(temperatures), sums
