"""The recipe of the demo models that ship: target, draft model, Medusa heads and EAGLE-3 head.

The shipped runs shared their cores with other work and partly followed the clock, so a repeated run gives models that
are alike, not the same.
"""

import ast
import logging
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig, PreTrainedModel

from paceline.checkpoints.corpus import SourceFile, load_corpus
from training.batches import TokenStore, encode_documents, load_store, save_store
from training.distill import DistillConfig, make_drafter
from training.export import STANDARD_LIBRARY, Card, export_model
from training.heads import Eagle3Config, MedusaConfig, make_eagle3, make_medusa
from training.loop import (
    MixedOptimizer,
    Schedule,
    has_checkpoint,
    has_fast_bfloat16,
    load_checkpoint,
    moved,
    new_model,
    pick_device,
    precision,
    save_checkpoint,
    walk,
)
from training.runs import RunConfig
from training.tokenizer import ASSISTANT, BEGIN_ID, END_ID, USER, VOCAB_SIZE, save_tokenizer, train_tokenizer

LOG = logging.getLogger(__name__)
RunConfigT = TypeVar("RunConfigT", bound=RunConfig)

CONTEXT_TOKENS = 2048
LONG_TOKENS = 1024
SEQUENCE_STAGES = ((0.55, 256), (0.9, 512), (1.0, LONG_TOKENS))
"""(share of the run, sequence length) pairs: short rows first, because attention costs most."""

RUN_ROWS: dict[str, Any] = {"batch_tokens": 8192, "round_rows": 128, "rounds_kept": 8, "steps_per_round": 16}
"""Rows of the drafters' runs; a vocabulary of 4,096 ids takes more than the defaults."""

DRAFTER_RUNS = ((365, 2), (588, 2), (435, 2), (800, 3))
"""Steps and layers of the draft model's runs, each of which goes on from the one before."""

PURPOSE = """Demonstrations and benches of speculative decoding without a download. The demo target
writes text that looks like Python; it is not a useful programming assistant."""

NUM_EXCHANGES = 4_000
MAX_EXCHANGE_CHARS = 2_000
HELD_OUT_BATCHES = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """A training run of the demo target; lengths in tokens, rates per step."""

    out: Path
    steps: int = 504
    seed: int = 0
    batch_tokens: int = 8192
    warmup_steps: int = 40
    decay_share: float = 0.55
    muon_lr: float = 0.02
    adamw_lr: float = 0.003
    checkpoint_every: int = 50
    evaluate_every: int = 200
    resume: bool = False

    @property
    def schedule(self) -> Schedule:
        """The run's learning-rate schedule."""
        decay_from = round(self.steps * (1 - self.decay_share))
        return Schedule(steps=self.steps, warmup_steps=self.warmup_steps, decay_from=decay_from)

    def sequence_tokens(self, step: int) -> int:
        """Row length at this step."""
        share = step / self.steps
        return next(length for until, length in SEQUENCE_STAGES if share < until)


def target_shape() -> LlamaConfig:
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


def prepare(config: TargetConfig) -> tuple[TokenStore, TokenStore]:
    """Train tokens and held-out tokens, made once and kept under `config.out`."""
    train_path, held_path = config.out / "train.npy", config.out / "held_out.npy"
    if not (config.resume and train_path.is_file() and held_path.is_file()):
        config.out.mkdir(parents=True, exist_ok=True)
        corpus = load_corpus()
        LOG.info("corpus: %d files, %d held out", len(corpus.train), len(corpus.held_out))
        tokenizer = train_tokenizer(file.text for file in corpus.train)
        save_tokenizer(tokenizer, config.out / "tokenizer", CONTEXT_TOKENS)
        texts = [file.text for file in corpus.train] + exchanges(corpus.train, NUM_EXCHANGES, config.seed)
        save_store(encode_documents(tokenizer, texts, BEGIN_ID, END_ID, config.seed), train_path)
        unseen = [file.text for file in corpus.held_out]
        save_store(encode_documents(tokenizer, unseen, BEGIN_ID, END_ID, config.seed), held_path)
    return load_store(train_path, config.seed), load_store(held_path, config.seed)


def next_token_loss(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats over ids `[batch, sequence + 1]`."""
    logits: torch.Tensor = model(input_ids=ids[:, :-1], use_cache=False).logits
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


def exchanges(files: tuple[SourceFile, ...], limit: int, seed: int = 0) -> list[str]:
    """Chats about documented functions, in the template's shape: the docstring's first line asks, the code answers."""
    found = [chat for file in files if not file.is_test for chat in _exchanges_of(file.text)]
    return found if len(found) <= limit else random.Random(seed).sample(found, limit)


def _exchanges_of(text: str) -> list[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    # Lines as the parser counts them: a form feed ends none.
    lines = [line + "\n" for line in text.split("\n")]
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        source = "".join(lines[node.lineno - 1 : node.end_lineno])
        if docstring and len(source) <= MAX_EXCHANGE_CHARS:
            summary = " ".join(docstring.split("\n\n")[0].split())
            answer = _dedent(source, node.col_offset).rstrip()
            found.append(f"{USER}\nWrite {node.name}: {summary}\n{ASSISTANT}\n{answer}")
    return found


def _dedent(source: str, columns: int) -> str:
    """Drop a method's indentation; lines inside a string that start further left stay whole."""
    prefix = " " * columns
    return "\n".join(line.removeprefix(prefix) for line in source.split("\n"))


def train_target(config: TargetConfig, shape: LlamaConfig | None = None) -> PreTrainedModel:
    """Run (or resume) the training; leaves tokenizer, tokens and checkpoint under `config.out`.

    Args:
        config: the run.
        shape: the model's shape, `target_shape()` when None.

    Raises:
        FileNotFoundError: `config.resume` is set and there is no checkpoint.
    """
    train, held_out = prepare(config)
    torch.manual_seed(config.seed)
    device = pick_device()
    model = moved(new_model(shape or target_shape()), device)
    optimizer = MixedOptimizer(model, int(model.config.vocab_size), config.muon_lr, config.adamw_lr)
    first = load_checkpoint(config.out, model, optimizer) if config.resume else 0
    for step, bar in walk(first, config.steps):
        started_s = time.monotonic()
        ids = train.batch(step, config.batch_tokens, config.sequence_tokens(step)).to(device)
        with precision(device, has_fast_bfloat16(device)):
            loss = next_token_loss(model, ids)
        torch.autograd.backward(loss)
        optimizer.step(config.schedule.factor(step))
        rate = config.batch_tokens / (time.monotonic() - started_s)
        bar.set_postfix_str(f"loss {loss.item():.3f}, {rate:,.0f} tokens/s")
        if (step + 1) % config.checkpoint_every == 0:
            save_checkpoint(config.out, step + 1, model, optimizer)
        if (step + 1) % config.evaluate_every == 0:
            tqdm.write(f"step {step + 1}: held-out {held_out_loss(model, held_out, config.batch_tokens):.3f} nats")
    save_checkpoint(config.out, max(first, config.steps), model, optimizer)
    return model


def make_demo(out: Path, resume: bool) -> None:
    """Train, export and measure the four demo models under `out`, as those that ship were made."""
    target = out / "demo-target"
    work = out / "demo-target-run"
    make_target(TargetConfig(out=work, resume=resume and has_checkpoint(work)), target)
    start = None
    for run, (steps, layers) in enumerate(DRAFTER_RUNS):
        name = "demo-drafter" if run == len(DRAFTER_RUNS) - 1 else f"demo-drafter-{run + 1}"
        config = DistillConfig(
            target=target, out=out / name, steps=steps, layers=layers, seed=run, start=start, **RUN_ROWS
        )
        make_drafter(_resumed(config, resume))
        start = config.out
    medusa = MedusaConfig(target=target, out=out / "demo-medusa", steps=145, **(RUN_ROWS | {"batch_tokens": 1024}))
    make_medusa(_resumed(medusa, resume))
    eagle3 = Eagle3Config(
        target=target,
        out=out / "demo-eagle3",
        steps=326,
        unrolled_steps=4,
        draft_vocab_size=3072,
        **(RUN_ROWS | {"batch_tokens": 4096}),
    )
    make_eagle3(_resumed(eagle3, resume))


def _resumed(config: RunConfigT, resume: bool) -> RunConfigT:
    """The run, resumed if that is wanted and it has begun."""
    return replace(config, resume=resume and has_checkpoint(config.run_folder))


def make_target(config: TargetConfig, out: Path) -> None:
    """Train the target, and export it with its held-out loss in the card.

    Raises:
        FileNotFoundError: as `train_target`.
    """
    model = train_target(config)
    _, held_out = prepare(replace(config, resume=True))
    loss = held_out_loss(model, held_out, config.batch_tokens)
    figures = (
        f"Seed {config.seed}, {config.steps} steps of {config.batch_tokens:,} tokens; mean cross-entropy on held-out "
        f"files {loss:.3f} nats per token."
    )
    summary = "Target of Paceline's demo pair, trained from nothing by `python -m training demo`."
    card = Card(
        title="Paceline demo target",
        summary=summary,
        figures=figures,
        data=STANDARD_LIBRARY,
        licence="apache-2.0",
        purpose=PURPOSE,
    )
    export_model(model, config.out / "tokenizer", out, card)
