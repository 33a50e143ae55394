"""Makes a drafter for any Llama-family target: its first layers, distilled on its probabilities.

Half and more of the training text is the target's own, because that is the text a drafter meets.
Rounds of it are a pure function of seed and round number, so a resumed run sees the same text.
"""

import copy
import json
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from paceline.training.batches import TokenStore, encode_for
from paceline.training.corpus import load_corpus
from paceline.training.loop import (
    MixedOptimizer,
    Schedule,
    has_fast_bfloat16,
    load_checkpoint,
    pick_device,
    precision,
    save_checkpoint,
    seeded,
    walk,
)
from paceline.training.models import decoder_of, head_weight, load_model, moved, new_model
from paceline.training.objective import DistillationResult, distillation
from paceline.training.rollout import continue_rows, hidden_states, sampling_chooser
from paceline.training.tokenizer import load_tokenizer

PREFIX_TOKENS = (16, 32, 64, 96)
LOWEST_LOSS_TEMPERATURE = 0.4
"""Greedy rows are scored at this temperature: at 0 the loss has no gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """One distillation; lengths in tokens, rates per step."""

    target: Path
    out: Path
    layers: int = 2
    steps: int = 1200
    seed: int = 0
    batch_tokens: int = 8192
    row_tokens: int = 256
    long_row_tokens: int = 1024
    generated_share: float = 0.75
    greedy_share: float = 0.4
    round_rows: int = 128
    rounds_kept: int = 8
    steps_per_round: int = 16
    tv_weight: float = 0.7
    muon_lr: float = 0.01
    adamw_lr: float = 0.001
    checkpoint_every: int = 50
    resume: bool = False
    minutes: float | None = None
    corpus: Path | None = None

    @property
    def schedule(self) -> Schedule:
        """The run's learning-rate schedule."""
        warmup = min(30, max(1, self.steps // 10))
        return Schedule(steps=self.steps, warmup_steps=warmup, decay_from=self.steps // 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Rows the target wrote: ids `[rows, row]`, hidden `[rows, row, hidden]`, a temperature each."""

    ids: torch.Tensor
    hidden: torch.Tensor
    temperatures: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs of one step; shapes as in `Round`."""

    ids: torch.Tensor
    target_hidden: torch.Tensor
    temperatures: torch.Tensor


class RoundSource:
    """The latest rounds of target text, made when first asked for.

    Args:
        config: row length, rows in a round, shares of temperatures.
        target: in evaluation mode, on its device.
        store: gives the prefixes.
    """

    def __init__(self, config: DistillConfig, target: PreTrainedModel, store: TokenStore) -> None:
        self._config, self._target, self._store = config, target, store
        self._rounds: OrderedDict[int, Round] = OrderedDict()

    def rows(self, step: int, count: int) -> Batch:
        """`count` random rows of the rounds that are current at this step."""
        config = self._config
        newest = step // config.steps_per_round
        current = [self._round(k) for k in range(max(0, newest - config.rounds_kept + 1), newest + 1)]
        rng = np.random.default_rng((config.seed, 4, step))
        picks = rng.integers(len(current) * config.round_rows, size=count)
        chosen = [(current[p // config.round_rows], int(p % config.round_rows)) for p in picks]
        return Batch(
            ids=torch.stack([source.ids[row] for source, row in chosen]),
            target_hidden=torch.stack([source.hidden[row] for source, row in chosen]),
            temperatures=torch.stack([source.temperatures[row] for source, row in chosen]),
        )

    def _round(self, number: int) -> Round:
        if number not in self._rounds:
            self._rounds[number] = self._write_round(number)
            while len(self._rounds) > self._config.rounds_kept:
                self._rounds.popitem(last=False)
        return self._rounds[number]

    def _write_round(self, number: int) -> Round:
        config, device = self._config, self._target.device
        rng = np.random.default_rng((config.seed, 3, number))
        length = int(rng.choice([n for n in PREFIX_TOKENS if n < config.row_tokens]))
        prefix = _prefixes(self._store, rng, config.round_rows, length).to(device)
        drawn = rng.uniform(0.2, 1.0, size=config.round_rows)
        drawn[rng.random(config.round_rows) < config.greedy_share] = 0.0
        temperatures = torch.tensor(drawn, dtype=torch.float32, device=device)
        generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
        ids, hidden = continue_rows(
            self._target,
            prefix,
            config.row_tokens + 1 - length,
            sampling_chooser(temperatures, generator),
            has_fast_bfloat16(device),
        )
        kept = torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
        return Round(ids=ids[:, :-1], hidden=hidden.to(kept), temperatures=temperatures)


def first_layers(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A float32 drafter: the target's first layers with its embeddings, final norm and head.

    Raises:
        ValueError: the target has fewer layers.
    """
    total = int(target.config.num_hidden_layers)
    if not 1 <= layers <= total:
        raise ValueError(f"layers is {layers}, but the target has {total}")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    drafter = new_model(config)
    wanted = drafter.state_dict().keys()
    state = {name: value.float() for name, value in target.state_dict().items() if name in wanted}
    drafter.load_state_dict(state)
    return moved(drafter, target.device)


def distill(config: DistillConfig) -> PreTrainedModel:
    """Run (or resume) the distillation; leaves a checkpoint under `config.out`.

    Raises:
        FileNotFoundError: no target there, or no checkpoint to resume from.
        ValueError: the target has fewer layers than `config.layers`.
    """
    seeded(config.seed)
    device = pick_device()
    target = moved(load_model(config.target), device)
    drafter = first_layers(target, config.layers)
    nn.Module.train(drafter)
    optimizer = MixedOptimizer(drafter, config.muon_lr, config.adamw_lr)
    first = load_checkpoint(config.out, drafter, optimizer)[0] if config.resume else 0
    store = _tokens_for(config)
    rounds = RoundSource(config, target, store)
    done = first
    for step, position, bar in walk(first, config.steps, config.minutes):
        started_s = time.monotonic()
        batch = _batch(config, step, rounds, target, store)
        result = _update(config, drafter, target, batch)
        optimizer.step(config.schedule.factor(position))
        rate = batch.ids.numel() / (time.monotonic() - started_s)
        bar.set_postfix_str(
            f"kl {result.kl:.3f}, tv {result.tv:.3f}, agree {result.agreement:.3f}, {rate:,.0f} tokens/s"
        )
        done = step + 1
        if done % config.checkpoint_every == 0:
            save_checkpoint(config.out, done, drafter, optimizer, {"tv": result.tv})
    save_checkpoint(config.out, done, drafter, optimizer, {})
    return drafter


def _tokens_for(config: DistillConfig) -> TokenStore:
    """The corpus in the target's ids."""
    shape = json.loads((config.target / "config.json").read_text(encoding="utf-8"))
    end = shape.get("eos_token_id")
    return encode_for(
        load_tokenizer(config.target),
        load_corpus(config.corpus).train,
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


def _batch(
    config: DistillConfig,
    step: int,
    rounds: RoundSource,
    target: PreTrainedModel,
    store: TokenStore,
) -> Batch:
    """Target-written rows, or corpus rows (every fourth of those batches with long rows)."""
    rng = np.random.default_rng((config.seed, 5, step))
    if rng.random() < config.generated_share:
        return rounds.rows(step, config.batch_tokens // config.row_tokens)
    length = config.long_row_tokens if rng.random() < 0.25 else config.row_tokens
    ids = store.batch(step, config.batch_tokens, length)[:, :-1].to(target.device)
    with precision(target.device, has_fast_bfloat16(target.device)):
        hidden = hidden_states(target, ids)
    temperatures = torch.ones(ids.shape[0], device=target.device)
    return Batch(ids=ids, target_hidden=hidden, temperatures=temperatures)


def _update(
    config: DistillConfig, drafter: PreTrainedModel, target: PreTrainedModel, batch: Batch
) -> DistillationResult:
    """Leave the gradients of one batch in the drafter's parameters."""
    use_bfloat16 = has_fast_bfloat16(target.device)
    with precision(target.device, use_bfloat16):
        hidden = decoder_of(drafter)(input_ids=batch.ids, use_cache=False).last_hidden_state
    flat = hidden.flatten(0, 1)
    head = head_weight(drafter)
    temperatures = batch.temperatures.clamp_min(LOWEST_LOSS_TEMPERATURE)
    result = distillation(
        flat.detach(),
        head.detach(),
        batch.target_hidden.flatten(0, 1),
        head_weight(target),
        temperatures.repeat_interleave(batch.ids.shape[1]),
        config.tv_weight,
        torch.bfloat16 if use_bfloat16 else torch.float32,
    )
    flat.backward(result.grad_hidden.to(flat.dtype))
    # A tied head has its embedding gradient already; an untied one has none yet.
    head.grad = result.grad_head if head.grad is None else head.grad + result.grad_head
    return result
