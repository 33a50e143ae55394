"""Measures how often a drafter's token is the target's, along the target's own text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from paceline.training.models import head_weight
from paceline.training.rollout import (
    MIN_TEMPERATURE,
    continue_rows,
    gumbel,
    gumbel_chooser,
    hidden_states,
)

PROMPT_TOKENS = 64
CHAINS = (3, 5, 7)
TEMPERATURES = (0.0, 0.7, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Shares of drafted tokens at one temperature.

    `coupled`: both models choose with the same Gumbel noise (at 0: both greedy). `classic_bound`:
    mean of 1 - TV, the most any rule can accept. `top_2`, `top_4`: the target's token is among the
    drafter's best perturbed scores. `mean_length`: per chain length, tokens committed a round, the
    target's own included.
    """

    temperature: float
    num_tokens: int
    coupled: float
    classic_bound: float
    top_2: float
    top_4: float
    mean_length: dict[int, float]


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[str]) -> torch.Tensor:
    """Ids `[prompts, length]`, all cut to the shortest (`PROMPT_TOKENS` at most)."""
    encoded = [tokenizer.encode(prompt).ids for prompt in prompts]
    length = min(PROMPT_TOKENS, *(len(ids) for ids in encoded))
    return torch.tensor([ids[:length] for ids in encoded])


@torch.no_grad()
def measure(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    prompts: torch.Tensor,
    temperature: float,
    num_new: int = 128,
    seed: int = 0,
) -> Acceptance:
    """Let the target continue the prompts, then ask the drafter at every place of that text.

    Args:
        target: float32.
        drafter: float32, same vocabulary.
        prompts: ids `[prompts, length]`.
        temperature: 0 is greedy.
        num_new: tokens written after each prompt.
        seed: of the noise both models share.
    """
    prompts = prompts.to(target.device)
    noise_source = torch.Generator().manual_seed(seed)
    ids, target_hidden = continue_rows(target, prompts, num_new, gumbel_chooser(temperature, noise_source))
    first = prompts.shape[1] - 1
    draft_hidden = hidden_states(drafter, ids[:, :-1])[:, first:]
    noise_source.manual_seed(seed)
    tallies, kept = [], []
    for place in range(num_new):
        target_logits = target_hidden[:, first + place] @ head_weight(target).T
        draft_logits = draft_hidden[:, place] @ head_weight(drafter).T
        noise = gumbel((target_logits.shape[0], target_logits.shape[1]), noise_source)
        noise = noise.to(target.device) if temperature else torch.zeros_like(target_logits)
        wanted = ids[:, first + 1 + place]
        tallies.append(_tally(target_logits, draft_logits, noise, wanted, temperature))
        kept.append(tallies[-1][:, 0])
    means = torch.stack(tallies).mean(dim=(0, 1)).tolist()
    accepted = torch.stack(kept, dim=1).bool().tolist()
    return Acceptance(
        temperature=temperature,
        num_tokens=num_new * prompts.shape[0],
        coupled=means[0],
        top_2=means[1],
        top_4=means[2],
        classic_bound=means[3],
        mean_length={gamma: mean_chain_length(accepted, gamma) for gamma in CHAINS},
    )


def _tally(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    noise: torch.Tensor,
    wanted: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """`[rows, 4]`: in the drafter's top 1, 2, 4, and 1 - TV."""
    scale = max(temperature, MIN_TEMPERATURE)
    best = (draft_logits / scale + noise).topk(4, dim=-1).indices
    hits = best == wanted.unsqueeze(1)
    target_probs = torch.softmax(target_logits / scale, dim=-1)
    draft_probs = torch.softmax(draft_logits / scale, dim=-1)
    overlap = torch.minimum(target_probs, draft_probs).sum(dim=-1)
    columns = [hits[:, :1].any(1), hits[:, :2].any(1), hits.any(1)]
    return torch.stack([*(column.float() for column in columns), overlap], dim=1)


def mean_chain_length(accepted: Sequence[Sequence[bool]], gamma: int) -> float:
    """Tokens committed a round when chains of `gamma` drafts walk along each row.

    Args:
        accepted: per row and place, whether the drafter had the target's token.
        gamma: drafts a round.
    """
    rounds = committed = 0
    for row in accepted:
        place = 0
        # A round that the row's end cuts short would count too few: it is left out.
        while place + gamma < len(row):
            run = 0
            while run < gamma and row[place + run]:
                run += 1
            place += run + 1
            committed += run + 1
            rounds += 1
    return committed / rounds if rounds else 0.0


def table(results: Sequence[Acceptance]) -> str:
    """A Markdown table, one row a temperature."""
    chains = " / ".join(str(gamma) for gamma in CHAINS)
    lines = [
        "| temperature | coupled | classic bound (1 - TV) | target in draft top 2 / 4 "
        f"| mean length, chain {chains} | tokens |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        lengths = " / ".join(f"{result.mean_length[gamma]:.2f}" for gamma in CHAINS)
        lines.append(
            f"| {result.temperature:g} | {result.coupled:.3f} | {result.classic_bound:.3f} "
            f"| {result.top_2:.3f} / {result.top_4:.3f} | {lengths} | {result.num_tokens} |"
        )
    return "\n".join(lines)
