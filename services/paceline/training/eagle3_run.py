"""Trains an EAGLE-3 head: its draft vocabulary, and lessons for every step of its chains."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.training.eagle3 import Eagle3, default_aux_layers, eagle3_config
from paceline.training.models import head_weight
from paceline.training.runs import Batch, Lesson, RunConfig, TextSource, frozen_target, train_drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(RunConfig):
    """One training of a head; `step_decay ** s` is the weight of step `s` of the unrolled chain.

    `aux_layers` are the layers of the target whose outputs are fused, `default_aux_layers` when None.
    """

    muon_lr: float = 0.02
    unrolled_steps: int = 5
    draft_vocab_size: int = 2048
    aux_layers: tuple[int, int, int] | None = None
    step_decay: float = 0.8


def train_eagle3(config: Eagle3Config) -> Eagle3:
    """Run (or resume) the training; leaves a checkpoint under `config.out`.

    Raises:
        FileNotFoundError: no target there, or no checkpoint to resume from.
        ValueError: a size or a layer the target does not have.
    """
    target = frozen_target(config)
    aux_layers = config.aux_layers or default_aux_layers(int(target.config.num_hidden_layers))
    shape = eagle3_config(target, config.draft_vocab_size, aux_layers)
    text = TextSource(config, target, aux_layers)
    draft_ids = most_frequent(text.token_shares(int(target.config.vocab_size)), config.draft_vocab_size)
    head = Eagle3(shape, target, draft_ids).to(target.device)
    head.begin_from(target)

    def lessons(batch: Batch) -> list[Lesson]:
        return eagle3_lessons(config, head, target, batch)

    train_drafter(config, text, head, config.draft_vocab_size, lessons)
    return head


def most_frequent(shares: np.ndarray[tuple[int], np.dtype[np.float64]], count: int) -> torch.Tensor:
    """The `count` ids of the largest shares, ascending; of equal ones the lower id."""
    return torch.from_numpy(np.sort(np.argsort(-shares, kind="stable")[:count]))


def eagle3_lessons(config: Eagle3Config, head: Eagle3, target: PreTrainedModel, batch: Batch) -> list[Lesson]:
    """A lesson a step: the target's distribution over the draft vocabulary, renormalised.

    Places where the target's best id is outside of it are left out.
    """
    own_ids, weight = head.draft_ids, head_weight(target).detach()
    final = batch.states[..., : head.config.hidden_size].float()
    with torch.no_grad():
        in_vocabulary = torch.stack([head.t2d[(row @ weight.T).argmax(dim=-1)] for row in final])
    return [
        Lesson(
            draft=drafted.states,
            head=drafted.head,
            target=final[:, 1 + step :],
            target_head=weight[own_ids],
            kept=in_vocabulary[:, 1 + step :],
            weight=config.step_decay**step,
        )
        for step, drafted in enumerate(head.chain(batch.ids, batch.states, config.unrolled_steps))
    ]
