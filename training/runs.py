"""Shared parts of all drafter trainings on a frozen target: settings, text, lessons and the loop.

Half and more of the training text is the target's own, because that is the text a drafter meets.
Rounds of it are a pure function of seed and round number, so a resumed run sees the same text.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from paceline.checkpoints.corpus import load_corpus
from paceline.service.config import setting
from training.batches import TokenStore, encode_documents
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
from training.models import Chooser, continue_rows, hidden_states, load_model, load_tokenizer
from training.objective import DistillationResult, distillation

PREFIX_TOKENS = (16, 32, 64, 96)
LOWEST_SAMPLING_TEMPERATURE = 1e-6
LOWEST_LOSS_TEMPERATURE = 0.4
"""Greedy rows are scored at this temperature: at 0 the loss has no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A training run of a drafter on a frozen target; lengths in tokens, rates per step."""

    target: Path = setting(help="Checkpoint folder of the target.")
    out: Path = setting(help="Folder for the drafter; checkpoints of the run go to OUT-run beside it.")
    corpus: Path | None = setting(None, help="Folder of *.py files to learn from instead of the standard library.")
    steps: int = setting(1200, help="Steps of the run.", low=0)
    seed: int = setting(0, help="Same seed, same run.", low=0)
    resume: bool = setting(False, help="Go on from the checkpoint in OUT-run.")
    batch_tokens: int = setting(8192, help="Tokens of a step, a multiple of 1024.", low=1024)
    row_tokens: int = setting(256, help="Tokens of a row, a divisor of 1024.", low=32)
    long_row_tokens: int = setting(1024, help="Tokens of long rows, which a quarter of the corpus comes in.", low=32)
    generated_share: float = setting(0.75, help="Share of batches that the target wrote itself.", low=0, high=1)
    greedy_share: float = setting(0.4, help="Share of rows that the target writes at temperature 0.", low=0, high=1)
    round_rows: int = setting(128, help="Rows that the target writes at once.", low=1)
    rounds_kept: int = setting(8, help="Most recent such rounds that batches are drawn from.", low=1)
    steps_per_round: int = setting(16, help="Steps until the target writes anew.", low=1)
    tv_weight: float = setting(0.7, help="Weight of total variation in the loss; the rest is KL.", low=0, high=1)
    muon_lr: float = setting(0.01, help="Learning rate of the hidden matrices.", low=0)
    adamw_lr: float = setting(0.001, help="Learning rate of all other weights.", low=0)
    checkpoint_every: int = setting(50, help="Steps between two checkpoints.", low=1)

    @property
    def run_folder(self) -> Path:
        """Where checkpoints go."""
        return self.out.with_name(self.out.name + "-run")

    @property
    def schedule(self) -> Schedule:
        """The run's learning-rate schedule."""
        warmup = min(30, max(1, self.steps // 10))
        return Schedule(steps=self.steps, warmup_steps=warmup, decay_from=self.steps // 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of text: ids `[rows, row]`, what `hidden_states` gives for them, a temperature each."""

    ids: torch.Tensor
    states: torch.Tensor
    temperatures: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """States of a drafter beside those of the target that predict the same tokens.

    Attributes:
        draft: `[rows, places, draft hidden]`, with their graph.
        head: `[ids, draft hidden]`; learns where it requires a gradient.
        target: normed final states `[rows, places, hidden]`.
        target_head: `[ids, hidden]`, the rows of the same ids.
        kept: places that count, `[rows, places]`; all when None.
        weight: of this lesson among those of a step.
    """

    draft: torch.Tensor
    head: torch.Tensor
    target: torch.Tensor
    target_head: torch.Tensor
    kept: torch.Tensor | None = None
    weight: float = 1.0


class TextSource:
    """Batches of text for one run: rounds that the target writes when they are first needed, and corpus.

    Args:
        config: row length, rows in a round, shares of temperatures.
        target: in evaluation mode, on its device.
        taps: further layers whose outputs `Batch.states` holds.

    Raises:
        FileNotFoundError: the target has no tokenizer, or the corpus no source.
    """

    def __init__(self, config: RunConfig, target: PreTrainedModel, taps: Sequence[int] = ()) -> None:
        self._config, self._target, self._taps = config, target, tuple(taps)
        self._store = _corpus_of(config)
        self._rounds: OrderedDict[int, Batch] = OrderedDict()

    def batch(self, step: int) -> Batch:
        """Target-written rows, or corpus rows (every fourth of those batches with long rows)."""
        config, device = self._config, self._target.device
        rng = np.random.default_rng((config.seed, 5, step))
        if rng.random() < config.generated_share:
            return self._written_rows(step, config.batch_tokens // config.row_tokens)
        length = config.long_row_tokens if rng.random() < 0.25 else config.row_tokens
        ids = self._store.batch(step, config.batch_tokens, length)[:, :-1].to(device)
        with torch.no_grad(), precision(device, has_fast_bfloat16(device)):
            states = hidden_states(self._target, ids, self._taps)
        return Batch(ids=ids, states=states, temperatures=torch.ones(ids.shape[0], device=device))

    def token_shares(self, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Share of each id in the run's text, as the corpus and the first round have it."""
        written = self._round(0).ids.flatten().cpu().numpy()
        share = self._config.generated_share
        in_corpus, in_round = (
            np.bincount(ids.astype(np.int64), minlength=vocab_size) / len(ids) for ids in (self._store.tokens, written)
        )
        mixed: np.ndarray[tuple[int], np.dtype[np.float64]] = (1 - share) * in_corpus + share * in_round
        return mixed

    def _written_rows(self, step: int, count: int) -> Batch:
        """`count` random rows of the rounds that are current at this step."""
        config = self._config
        newest = step // config.steps_per_round
        current = [self._round(k) for k in range(max(0, newest - config.rounds_kept + 1), newest + 1)]
        rng = np.random.default_rng((config.seed, 4, step))
        picks = rng.integers(len(current) * config.round_rows, size=count)
        chosen = [(current[p // config.round_rows], int(p % config.round_rows)) for p in picks]
        return Batch(
            ids=torch.stack([source.ids[row] for source, row in chosen]),
            states=torch.stack([source.states[row] for source, row in chosen]),
            temperatures=torch.stack([source.temperatures[row] for source, row in chosen]),
        )

    def _round(self, number: int) -> Batch:
        if number not in self._rounds:
            self._rounds[number] = self._write_round(number)
            while len(self._rounds) > self._config.rounds_kept:
                self._rounds.popitem(last=False)
        return self._rounds[number]

    def _write_round(self, number: int) -> Batch:
        config, device = self._config, self._target.device
        rng = np.random.default_rng((config.seed, 3, number))
        length = int(rng.choice([n for n in PREFIX_TOKENS if n < config.row_tokens]))
        prefix = _prefixes(self._store, rng, config.round_rows, length).to(device)
        drawn = rng.uniform(0.2, 1.0, size=config.round_rows)
        drawn[rng.random(config.round_rows) < config.greedy_share] = 0.0
        temperatures = torch.tensor(drawn, dtype=torch.float32, device=device)
        generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
        choose = sampling_chooser(temperatures, generator)
        # A single autocast context around all steps, so that weights are converted once.
        with precision(device, has_fast_bfloat16(device)):
            ids, states = continue_rows(self._target, prefix, config.row_tokens + 1 - length, choose, self._taps)
        kept = torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
        return Batch(ids=ids[:, :-1], states=states.to(kept), temperatures=temperatures)


def frozen_target(config: RunConfig) -> PreTrainedModel:
    """The run's target on its device; seeds torch for what is made next.

    Raises:
        FileNotFoundError: no target there, or no checkpoint to resume from.
    """
    if config.resume:
        require_checkpoint(config.run_folder)
    torch.manual_seed(config.seed)
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
        every = torch.ones(rows, places, dtype=torch.bool, device=scales.device)
        kept = every if lesson.kept is None else lesson.kept
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


def _corpus_of(config: RunConfig) -> TokenStore:
    """The corpus in the target's ids."""
    shape = json.loads((config.target / "config.json").read_text(encoding="utf-8"))
    end = shape.get("eos_token_id")
    return encode_documents(
        load_tokenizer(config.target),
        [file.text for file in load_corpus(config.corpus).train],
        shape.get("bos_token_id"),
        end[0] if isinstance(end, list) else end,
        config.seed,
    )


def _prefixes(store: TokenStore, rng: np.random.Generator, rows: int, length: int) -> torch.Tensor:
    """Ids `[rows, length]` cut anywhere in the corpus, half of them behind a begin token."""
    starts = rng.integers(len(store.tokens) - length, size=rows)
    ids = np.stack([store.tokens[at : at + length].astype(np.int64) for at in starts])
    if store.begin_id is not None:
        ids[rng.random(rows) < 0.5, 0] = store.begin_id
    return torch.from_numpy(ids)


def sampling_chooser(temperatures: torch.Tensor, generator: torch.Generator) -> Chooser:
    """Plain sampling at a temperature per row `[batch]`; one random number a row, so it is cheap."""
    scale = temperatures.unsqueeze(1).clamp_min(LOWEST_SAMPLING_TEMPERATURE)

    def choose(logits: torch.Tensor) -> torch.Tensor:
        mass = torch.softmax(logits / scale, dim=-1).cumsum(dim=-1)
        uniform = torch.rand(len(logits), 1, generator=generator, device=generator.device)
        # The sum may end a little below 1; scaling by it keeps the last id reachable and no other.
        place = torch.searchsorted(mass, uniform.to(mass.device) * mass[:, -1:])
        return place.squeeze(1).clamp_max(mass.shape[1] - 1)

    return choose
