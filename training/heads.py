"""Trains heads on a frozen target's states: Medusa heads and an EAGLE-3 head."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from paceline.service.config import setting
from training.eagle3 import Eagle3, begin_from, default_aux_layers, eagle3_config
from training.export import export_heads, publish
from training.medusa import MedusaHeads
from training.models import head_weight
from training.runs import Lesson, RunConfig, frozen_target, train_drafter
from training.text import Batch, TextSource

TRAINED_ON = "trained on its probabilities by `python -m training"


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig(RunConfig):
    """A training run of Medusa heads (arXiv 2401.10774, section 2.2.1).

    Rates are above those of other drafters, because blocks begin at 0 and have far to go.
    """

    heads: int = setting(4, help="Heads, each of which guesses one token.", low=1)
    blocks: int = setting(2, help="Residual blocks of a head.", low=1)
    own_heads: bool = setting(False, help="Give each head a vocabulary matrix of its own, not the target's.")
    head_decay: float = setting(0.8, help="To the power of k, the weight of head k's loss.", low=0, high=1)
    muon_lr: float = 0.05
    adamw_lr: float = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(RunConfig):
    """A training run of an EAGLE-3 head (arXiv 2503.01840)."""

    unrolled_steps: int = setting(5, help="Guesses of a chain that training follows.", low=1)
    draft_vocab_size: int = setting(8192, help="Token ids that it can guess at most, the most frequent ones.", low=1)
    aux_layers: tuple[int, ...] = setting(
        (), help="Three layers of the target whose outputs it reads; for L layers 1, L//2-1 and L-4 if not given."
    )
    step_decay: float = setting(0.8, help="To the power of s, the weight of the loss of guess s.", low=0, high=1)
    muon_lr: float = 0.02


def train_medusa(config: MedusaConfig) -> MedusaHeads:
    """Run (or resume) the training; leaves a checkpoint in `config.run_folder`.

    Raises:
        FileNotFoundError: no target there, or no checkpoint to resume from.
    """
    target = frozen_target(config)
    heads = MedusaHeads(target, config.heads, config.blocks, config.own_heads).to(target.device)
    target_head = head_weight(target).detach()

    def lessons(batch: Batch) -> list[Lesson]:
        return [
            Lesson(
                draft=drafted.states,
                head=drafted.head,
                target=batch.states[:, 1 + k :],
                target_head=target_head,
                kept=batch.taught[:, 1 + k :],
                weight=config.head_decay**k,
            )
            for k, drafted in enumerate(heads.chain(batch.ids, batch.states, config.heads))
        ]

    train_drafter(config, TextSource(config, target), heads, len(target_head), lessons)
    return heads


def train_eagle3(config: Eagle3Config) -> Eagle3:
    """Run (or resume) the training; leaves a checkpoint in `config.run_folder`.

    Raises:
        FileNotFoundError: no target there, or no checkpoint to resume from.
        ValueError: a size or a layer the target does not have.
    """
    target = frozen_target(config)
    aux_layers = config.aux_layers or default_aux_layers(int(target.config.num_hidden_layers))
    vocab_size = int(target.config.vocab_size)
    num_draft_ids = min(config.draft_vocab_size, vocab_size)
    shape = eagle3_config(target, num_draft_ids, aux_layers)
    text = TextSource(config, target, aux_layers)
    draft_ids = most_frequent(text.token_shares(vocab_size), num_draft_ids)
    head = Eagle3(shape, target, draft_ids).to(target.device)
    begin_from(head, target)

    def lessons(batch: Batch) -> list[Lesson]:
        return eagle3_lessons(config, head, target, batch)

    train_drafter(config, text, head, num_draft_ids, lessons)
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
    kept = batch.taught & head.t2d[batch.best]
    return [
        Lesson(
            draft=drafted.states,
            head=drafted.head,
            target=final[:, 1 + step :],
            target_head=weight[own_ids],
            kept=kept[:, 1 + step :],
            weight=config.step_decay**step,
        )
        for step, drafted in enumerate(head.chain(batch.ids, batch.states, config.unrolled_steps))
    ]


def make_medusa(config: MedusaConfig) -> None:
    """Train Medusa heads, and export them with their acceptance in the card.

    Raises:
        FileNotFoundError: as `train_medusa`.
    """
    heads = train_medusa(config)
    summary = (
        f"{config.heads} Medusa heads (arXiv 2401.10774) on the frozen `{config.target.name}`, "
        f"{'with output heads of their own' if config.own_heads else 'which share its output head'}, "
        f"{TRAINED_ON} medusa`."
    )
    publish(config, "Medusa heads", summary, lambda card: export_heads(heads, heads.layout, config.out, card))


def make_eagle3(config: Eagle3Config) -> None:
    """Train an EAGLE-3 head, and export it with its acceptance in the card.

    Raises:
        FileNotFoundError: as `train_eagle3`.
        ValueError: as `train_eagle3`.
    """
    head = train_eagle3(config)
    summary = (
        f"An EAGLE-3 head (arXiv 2503.01840) on the frozen `{config.target.name}`: reads the outputs of its layers "
        f"{', '.join(map(str, head.taps))}, guesses among {len(head.draft_ids)} token ids, {TRAINED_ON} eagle3`."
    )
    publish(config, "EAGLE-3 head", summary, lambda card: export_heads(head, head.layout, config.out, card))
