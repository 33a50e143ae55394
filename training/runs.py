"""Shared parts of all drafter trainings on a frozen target: settings, lessons and the loop."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from paceline.service.config import setting
from training.loop import (
    MixedOptimizer,
    Schedule,
    has_fast_bfloat16,
    load_checkpoint,
    moved,
    pick_device,
    precision,
    require_checkpoint,
    save_checkpoint,
    walk,
)
from training.models import load_model
from training.objective import DistillationResult, distillation
from training.text import Batch, TextConfig, TextSource

LOG = logging.getLogger(__name__)

LOWEST_LOSS_TEMPERATURE = 0.4
"""Greedy rows are scored at this temperature: at 0 the loss has no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(TextConfig):
    """A training run of a drafter on a frozen target; rates per step."""

    steps: int = setting(1200, help="Steps of the run.", low=0)
    resume: bool = setting(False, help="Go on from the checkpoint in OUT-run.")
    tv_weight: float = setting(0.7, help="Weight of total variation in the loss; the rest is KL.", low=0, high=1)
    muon_lr: float = setting(0.01, help="Learning rate of the hidden matrices.", low=0)
    adamw_lr: float = setting(0.001, help="Learning rate of all other weights.", low=0)
    checkpoint_every: int = setting(50, help="Steps between two checkpoints.", low=1)
    closing_prompts: int = setting(
        40, help="Held-out prompts of the closing measurement; 0 leaves it out.", low=0, high=1000
    )
    data: str = setting(
        "", help="Sentences of the model card on the text and its licence; names of the files if not given."
    )
    licence: str = setting(
        "", help="Licence of the drafter in its card, an SPDX name; if not given, that of the target's README.md."
    )

    @property
    def schedule(self) -> Schedule:
        """The run's learning-rate schedule."""
        warmup = min(30, max(1, self.steps // 10))
        return Schedule(steps=self.steps, warmup_steps=warmup, decay_from=self.steps // 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """States of a drafter beside those of the target that predict the same tokens.

    Attributes:
        draft: `[rows, places, draft hidden]`, with their graph.
        head: `[ids, draft hidden]`; learns where it requires a gradient.
        target: normed final states `[rows, places, hidden]`.
        target_head: `[ids, hidden]`, the rows of the same ids.
        kept: places that count, `[rows, places]`.
        weight: of this lesson among those of a step.
    """

    draft: torch.Tensor
    head: torch.Tensor
    target: torch.Tensor
    target_head: torch.Tensor
    kept: torch.Tensor
    weight: float = 1.0


def frozen_target(config: RunConfig) -> PreTrainedModel:
    """The run's target on its device; seeds torch for what is made next.

    Raises:
        FileNotFoundError: no target there, or no checkpoint to resume from.
    """
    if config.resume:
        require_checkpoint(config.run_folder)
    torch.manual_seed(config.seed)
    LOG.info("loading the target %s", config.target)
    return moved(load_model(config.target), pick_device())


def train_drafter(
    config: RunConfig,
    text: TextSource,
    drafter: nn.Module,
    num_ids: int,
    lessons: Callable[[Batch], list[Lesson]],
) -> None:
    """Run (or resume) a training; leaves a checkpoint in `config.run_folder`.

    Args:
        config: the run.
        text: what to learn on.
        drafter: all its parameters that require gradients learn.
        num_ids: rows of its output head.
        lessons: what the drafter makes of a batch.

    Raises:
        FileNotFoundError: `config.resume` is set and there is no checkpoint.
    """
    nn.Module.train(drafter)
    optimizer = MixedOptimizer(drafter, num_ids, config.muon_lr, config.adamw_lr)
    first = load_checkpoint(config.run_folder, drafter, optimizer) if config.resume else 0
    for step, bar in walk(first, config.steps):
        started_s = time.monotonic()
        batch = text.batch(step)
        with precision(batch.ids.device, has_fast_bfloat16(batch.ids.device)):
            taught = lessons(batch)
        results = _learn(config, taught, batch.temperatures)
        optimizer.step(config.schedule.factor(step))
        _show(bar, results, batch.ids.numel() / (time.monotonic() - started_s))
        if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
            save_checkpoint(config.run_folder, step + 1, drafter, optimizer)


def _learn(config: RunConfig, lessons: Sequence[Lesson], temperatures: torch.Tensor) -> list[DistillationResult]:
    """Leave the gradients of a step's lessons in the parameters that made them."""
    scales = temperatures.clamp_min(LOWEST_LOSS_TEMPERATURE)
    outputs, gradients, results = [], [], []
    for lesson in lessons:
        rows, places = lesson.draft.shape[:2]
        kept = lesson.kept
        draft = lesson.draft[kept]
        result = distillation(
            draft.detach(),
            lesson.head.detach(),
            lesson.target[kept],
            lesson.target_head,
            scales.unsqueeze(1).expand(rows, places)[kept],
            config.tv_weight,
            torch.bfloat16 if has_fast_bfloat16(scales.device) else torch.float32,
            lesson.head.requires_grad,
        )
        outputs.append(draft)
        gradients.append((lesson.weight * result.grad_hidden).to(draft.dtype))
        results.append(result)
    torch.autograd.backward(outputs, gradients)
    for lesson, result in zip(lessons, results, strict=True):
        if result.grad_head is not None:
            grad = lesson.weight * result.grad_head
            # A tied head has its embedding gradient already; an untied one has none yet.
            lesson.head.grad = grad if lesson.head.grad is None else lesson.head.grad + grad
    return results


def _show(bar: tqdm, results: Sequence[DistillationResult], rate: float) -> None:
    agreements = " ".join(f"{result.agreement:.3f}" for result in results)
    first = results[0]
    bar.set_postfix_str(f"kl {first.kl:.3f}, tv {first.tv:.3f}, agree {agreements}, {rate:,.0f} tokens/s")
