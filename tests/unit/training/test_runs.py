"""Tiny runs end to end: training, distillation, evaluation and export."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from training import demo
from training.acceptance import ModelChain, encode_prompts, measure
from training.batches import encode_documents, save_store
from training.demo import TargetConfig, train_target
from training.distill import DistillConfig, distill, first_layers, grown
from training.models import load_model, load_tokenizer
from training.tokenizer import BEGIN_ID, END_ID

pytestmark = pytest.mark.full

TEXT = "".join(f"def add_{n}(left, right):\n    return left + right * {n}\n\n" for n in range(200))


@pytest.fixture
def tiny_run(tmp_path: Path, target_folder: Path) -> TargetConfig:
    """A run whose tokens are already there, so that no test reads the whole library."""
    out = tmp_path / "run"
    out.mkdir()
    store = encode_documents(load_tokenizer(target_folder), [TEXT], BEGIN_ID, END_ID, 0)
    save_store(store, out / "train.npy")
    save_store(store, out / "held_out.npy")
    return TargetConfig(out=out, steps=6, batch_tokens=1024, warmup_steps=2, checkpoint_every=3, resume=True)


@pytest.fixture(autouse=True)
def float32_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same arithmetic on every machine."""
    for name in ("demo", "runs"):
        monkeypatch.setattr(f"training.{name}.has_fast_bfloat16", lambda device: False)


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    tiny_run: TargetConfig, tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(demo, "load_checkpoint", start_anew)
        whole = train_target(tiny_run, tiny_config).state_dict()
        patch.setattr(demo.MixedOptimizer, "step", interrupted_at(4))
        with pytest.raises(KeyboardInterrupt):
            train_target(tiny_run, tiny_config)
    resumed = train_target(tiny_run, tiny_config).state_dict()
    for name, value in whole.items():
        assert torch.equal(resumed[name], value)


def start_anew(*_: object) -> int:
    """Stands in for a checkpoint, where the tokens are there and the run is not."""
    return 0


def interrupted_at(step: int) -> Callable[[demo.MixedOptimizer, float], float]:
    """An optimizer step that fails on the given call, as Ctrl-C would make it."""
    original = demo.MixedOptimizer.step
    calls: list[float] = []

    def stopping(self: demo.MixedOptimizer, factor: float) -> float:
        if len(calls) == step:
            raise KeyboardInterrupt
        calls.append(factor)
        return original(self, factor)

    return stopping


def make_distillation(tmp_path: Path, target_folder: Path) -> DistillConfig:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.py").write_text(TEXT, encoding="utf-8")
    return DistillConfig(
        target=target_folder,
        out=tmp_path / "drafter-run",
        layers=1,
        steps=8,
        batch_tokens=1024,
        row_tokens=64,
        round_rows=16,
        steps_per_round=2,
        rounds_kept=2,
        checkpoint_every=4,
        corpus=corpus,
    )


def test_distillation_raises_acceptance_and_resumes_exactly(tmp_path: Path, target_folder: Path) -> None:
    config = make_distillation(tmp_path, target_folder)
    target = load_model(target_folder).eval()
    prompts = encode_prompts(load_tokenizer(target_folder), [TEXT[:200], TEXT[300:500]])
    before = measure(target, ModelChain(first_layers(target, 1).eval()), prompts, 1.0, num_new=64)
    distill(replace(config, steps=4))
    whole = distill(replace(config, steps=8))
    after = measure(target, ModelChain(whole.eval()), prompts, 1.0, num_new=64)
    assert after.classic_bound > before.classic_bound
    again = distill(replace(config, resume=True)).state_dict()
    for name, value in whole.state_dict().items():
        assert torch.equal(again[name], value)


def test_layers_that_a_drafter_grows_change_nothing_until_they_learn(tmp_path: Path, target_folder: Path) -> None:
    config = make_distillation(tmp_path, target_folder)
    target = load_model(target_folder).eval()
    small = distill(replace(config, steps=2)).eval()
    large = grown(small, 3, target).eval()
    ids = torch.arange(5, 37).unsqueeze(0)
    assert torch.equal(large(input_ids=ids).logits, small(input_ids=ids).logits)
    large.save_pretrained(tmp_path / "large")
    learnt = distill(replace(config, layers=3, start=tmp_path / "large", steps=1)).state_dict()
    for name, weight in large.state_dict().items():
        assert name.endswith("layernorm.weight") or not torch.equal(learnt[name], weight), name
