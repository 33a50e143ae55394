"""Trains the demo target from nothing: tokenizer, packed corpus, a small Llama."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig, PreTrainedModel

from paceline.training.batches import TokenStore, encode_documents, load_store, save_store
from paceline.training.corpus import exchanges, load_corpus
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
from paceline.training.models import logits_of, moved, new_model
from paceline.training.tokenizer import BEGIN_ID, END_ID, VOCAB_SIZE, save_tokenizer, train_tokenizer

LOG = logging.getLogger(__name__)

CONTEXT_TOKENS = 2048
LONG_TOKENS = 1024
SEQUENCE_STAGES = ((0.55, 256), (0.9, 512), (1.0, LONG_TOKENS))
"""(share of the run, sequence length) pairs: short rows first, because attention costs most."""

NUM_EXCHANGES = 4_000
HELD_OUT_BATCHES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """One training run of the demo target; lengths in tokens, rates per step."""

    out: Path
    steps: int = 850
    seed: int = 0
    batch_tokens: int = 8192
    warmup_steps: int = 40
    decay_share: float = 0.55
    muon_lr: float = 0.02
    adamw_lr: float = 0.003
    checkpoint_every: int = 50
    evaluate_every: int = 200
    resume: bool = False
    minutes: float | None = None

    @property
    def schedule(self) -> Schedule:
        """The run's learning-rate schedule."""
        decay_from = round(self.steps * (1 - self.decay_share))
        return Schedule(steps=self.steps, warmup_steps=self.warmup_steps, decay_from=decay_from)

    def sequence_tokens(self, position: float) -> int:
        """Row length at this position of the schedule."""
        share = position / self.steps
        return next(length for until, length in SEQUENCE_STAGES if share < until)


def target_config() -> LlamaConfig:
    """Shape of the demo target: 11.2 million parameters."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=320,
        num_hidden_layers=8,
        num_attention_heads=5,
        num_key_value_heads=5,
        head_dim=64,
        intermediate_size=864,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=BEGIN_ID,
        eos_token_id=END_ID,
        pad_token_id=END_ID,
    )


def prepare(config: DemoConfig) -> tuple[TokenStore, TokenStore]:
    """Train tokens and held-out tokens, made once and kept under `config.out`."""
    train_path, held_path = config.out / "train.npy", config.out / "held_out.npy"
    if not (config.resume and train_path.is_file() and held_path.is_file()):
        config.out.mkdir(parents=True, exist_ok=True)
        corpus = load_corpus()
        LOG.info("corpus: %d files, %d held out", len(corpus.train), len(corpus.held_out))
        tokenizer = train_tokenizer(file.text for file in corpus.train)
        save_tokenizer(tokenizer, config.out / "tokenizer", CONTEXT_TOKENS)
        chats = exchanges(corpus.train, NUM_EXCHANGES, config.seed)
        save_store(encode_documents(tokenizer, corpus.train, chats, config.seed), train_path)
        save_store(encode_documents(tokenizer, corpus.held_out, [], config.seed), held_path)
    return load_store(train_path, config.seed), load_store(held_path, config.seed)


def next_token_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over ids `[batch, sequence + 1]`."""
    logits = logits_of(model, ids[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, store: TokenStore, batch_tokens: int) -> float:
    """Mean cross-entropy in nats per token over the first batches of the held-out files."""
    device = next(model.parameters()).device
    count = max(1, min(HELD_OUT_BATCHES, store.num_chunks * 1024 // batch_tokens))
    losses = []
    for step in range(count):
        ids = store.batch(step, batch_tokens, LONG_TOKENS).to(device)
        with precision(device, has_fast_bfloat16(device)):
            losses.append(float(next_token_loss(model, ids)))
    return sum(losses) / count


def train_target(config: DemoConfig, shape: LlamaConfig | None = None) -> PreTrainedModel:
    """Run (or resume) the training; leaves tokenizer, tokens and checkpoint under `config.out`.

    Args:
        config: the run.
        shape: the model's shape, `target_config()` when None.

    Raises:
        FileNotFoundError: `config.resume` is set and there is no checkpoint.
    """
    train, held_out = prepare(config)
    seeded(config.seed)
    device = pick_device()
    model = moved(new_model(shape or target_config()), device)
    optimizer = MixedOptimizer(model, int(model.config.vocab_size), config.muon_lr, config.adamw_lr)
    first = load_checkpoint(config.out, model, optimizer)[0] if config.resume else 0
    _run_steps(config, model, optimizer, train, held_out, first)
    return model


def _run_steps(
    config: DemoConfig,
    model: PreTrainedModel,
    optimizer: MixedOptimizer,
    train: TokenStore,
    held_out: TokenStore,
    first: int,
) -> None:
    device = next(model.parameters()).device
    use_bfloat16 = has_fast_bfloat16(device)
    done, last_loss = first, float("nan")
    for step, position, bar in walk(first, config.steps, config.minutes):
        started_s = time.monotonic()
        ids = train.batch(step, config.batch_tokens, config.sequence_tokens(position)).to(device)
        with precision(device, use_bfloat16):
            loss = next_token_loss(model, ids)
        torch.autograd.backward(loss)
        optimizer.step(config.schedule.factor(position))
        rate = config.batch_tokens / (time.monotonic() - started_s)
        done, last_loss = step + 1, loss.item()
        bar.set_postfix_str(f"loss {last_loss:.3f}, {rate:,.0f} tokens/s")
        if done % config.checkpoint_every == 0:
            save_checkpoint(config.out, done, model, optimizer, {"loss": last_loss})
        if done % config.evaluate_every == 0:
            measured = held_out_loss(model, held_out, config.batch_tokens)
            tqdm.write(f"step {done}: train loss {last_loss:.3f}, held-out {measured:.3f} nats")
    save_checkpoint(config.out, done, model, optimizer, {"loss": last_loss})
    measured = held_out_loss(model, held_out, config.batch_tokens)
    tqdm.write(f"end, step {done}: train loss {last_loss:.3f}, held-out {measured:.3f} nats")
