"""Medusa heads and EAGLE-3: layouts, lessons, tiny runs and their figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from training.acceptance import (
    encode_prompts,
    load_drafter,
    measure,
)
from training.eagle3 import Eagle3, begin_from, eagle3_config, load_eagle3
from training.export import Card, export_heads
from training.heads import Eagle3Config, MedusaConfig, train_eagle3, train_medusa
from training.medusa import MedusaHeads, load_medusa
from training.models import hidden_states, load_model, load_tokenizer, rotations
from training.runs import RunConfig

pytestmark = pytest.mark.full

TEXT = "".join(f"def add_{n}(left, right):\n    return left + right * {n}\n\n" for n in range(200))
CARD = Card(title="tiny", summary="For tests.", figures="none", data="None.", licence="apache-2.0")
AUX = (0, 1, 2)
DRAFT_IDS = torch.tensor([1, 3, 4, 5, 8, *range(40, 200)])


@pytest.fixture
def tiny_config(tiny_config: LlamaConfig) -> LlamaConfig:
    """One layer more: three to read below the last."""
    return LlamaConfig(**(tiny_config.to_dict() | {"num_hidden_layers": 4, "layer_types": None}))


@pytest.fixture(autouse=True)
def float32_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.runs.has_fast_bfloat16", lambda device: False)


@pytest.fixture
def target(target_folder: Path) -> PreTrainedModel:
    return load_model(target_folder)


@pytest.fixture
def settings(tmp_path: Path, target_folder: Path) -> dict[str, object]:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.py").write_text(TEXT, encoding="utf-8")
    return {
        "target": target_folder,
        "out": tmp_path / "run",
        "steps": 6,
        "batch_tokens": 1024,
        "row_tokens": 64,
        "round_rows": 16,
        "steps_per_round": 2,
        "rounds_kept": 2,
        "checkpoint_every": 3,
        "corpus": corpus,
    }


@pytest.fixture
def medusa_run(settings: dict[str, object]) -> MedusaConfig:
    return MedusaConfig(**settings, heads=3, blocks=2)


@pytest.fixture
def eagle3_run(settings: dict[str, object]) -> Eagle3Config:
    return Eagle3Config(**settings, unrolled_steps=3, draft_vocab_size=200, aux_layers=AUX)


def new_head(target: PreTrainedModel, draft_ids: torch.Tensor = DRAFT_IDS) -> Eagle3:
    torch.manual_seed(3)
    head = Eagle3(eagle3_config(target, len(draft_ids), AUX), target, draft_ids)
    begin_from(head, target)
    return head


def train(config: RunConfig) -> nn.Module:
    return train_medusa(config) if isinstance(config, MedusaConfig) else train_eagle3(config)


# Runs


@pytest.mark.parametrize("kind", ["medusa_run", "eagle3_run"])
def test_training_raises_acceptance(kind: str, request: pytest.FixtureRequest, target_folder: Path) -> None:
    config: RunConfig = request.getfixturevalue(kind)
    target = load_model(target_folder)
    prompts = encode_prompts(load_tokenizer(target_folder), [TEXT[:200], TEXT[300:500]])
    bounds = [
        measure(target, train(replace(config, steps=steps)).eval(), prompts, 1.0, num_new=48).classic_bound
        for steps in (0, 16)
    ]
    assert bounds[1] > bounds[0]


# Medusa


@pytest.mark.parametrize("own_heads", [False, True])
def test_medusa_has_the_published_layout(tmp_path: Path, target: PreTrainedModel, own_heads: bool) -> None:
    heads = MedusaHeads(target, heads=3, blocks=2, own_heads=own_heads)
    nn.init.normal_(heads[1][0].linear.weight)
    export_heads(heads, heads.layout, tmp_path / "heads", CARD)
    weights = load_file(tmp_path / "heads" / "model.safetensors")
    expected = {f"{k}.{r}.linear.{part}" for k in range(3) for r in range(2) for part in ("weight", "bias")}
    assert weights.keys() == expected | ({f"{k}.2.weight" for k in range(3)} if own_heads else set())
    assert weights["1.0.linear.weight"].shape == (32, 32)
    assert weights["1.0.linear.weight"].dtype == torch.bfloat16
    layout = json.loads((tmp_path / "heads" / "config.json").read_text("utf-8"))
    assert (layout["medusa_num_heads"], layout["medusa_num_layers"]) == (3, 2)
    assert (layout["hidden_size"], layout["vocab_size"]) == (32, 320)
    assert layout["base_model_name_or_path"] == "target"
    loaded = load_medusa(tmp_path / "heads", target)
    for name, value in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().float())


# EAGLE-3


def test_eagle3_has_the_published_layout(tmp_path: Path, target: PreTrainedModel) -> None:
    head = new_head(target)
    export_heads(head, head.layout, tmp_path / "head", CARD)
    weights = load_file(tmp_path / "head" / "model.safetensors")
    layer = "midlayer."
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "fc.weight": (32, 96),
        layer + "input_layernorm.weight": (32,),
        layer + "hidden_norm.weight": (32,),
        layer + "self_attn.q_proj.weight": (32, 64),
        layer + "self_attn.k_proj.weight": (16, 64),
        layer + "self_attn.v_proj.weight": (16, 64),
        layer + "self_attn.o_proj.weight": (32, 32),
        layer + "post_attention_layernorm.weight": (32,),
        layer + "mlp.gate_proj.weight": (48, 32),
        layer + "mlp.up_proj.weight": (48, 32),
        layer + "mlp.down_proj.weight": (32, 48),
        "norm.weight": (32,),
        "lm_head.weight": (len(DRAFT_IDS), 32),
        "d2t": (len(DRAFT_IDS),),
        "t2d": (320,),
    }
    assert (weights["d2t"].dtype, weights["t2d"].dtype) == (torch.int64, torch.bool)
    assert weights["t2d"].sum() == len(DRAFT_IDS)
    assert torch.equal(weights["t2d"].nonzero().squeeze(1), torch.arange(len(DRAFT_IDS)) + weights["d2t"])
    layout = json.loads((tmp_path / "head" / "config.json").read_text("utf-8"))
    wanted = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": len(DRAFT_IDS),
        "vocab_size": 320,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
        "rope_parameters": target.config.to_dict()["rope_parameters"],
    }
    assert {name: layout[name] for name in wanted} == wanted
    assert not any(str(tmp_path) in str(value) for value in layout.values())
    loaded = load_eagle3(tmp_path / "head", target).state_dict()
    for name, value in head.state_dict().items():
        assert torch.equal(loaded[name], value.bfloat16().float() if value.is_floating_point() else value)


def test_heads_that_do_not_fit_are_refused(tmp_path: Path, target: PreTrainedModel) -> None:
    heads, head = MedusaHeads(target, heads=1, blocks=1, own_heads=False), new_head(target)
    export_heads(heads, heads.layout | {"hidden_size": 64}, tmp_path / "medusa", CARD)
    with pytest.raises(ValueError, match="hidden_size of the heads is 64, of the target 32"):
        load_drafter(tmp_path / "medusa", target)
    head.d2t[3] += 1
    export_heads(head, head.layout, tmp_path / "eagle3", CARD)
    with pytest.raises(ValueError, match="d2t and t2d"):
        load_drafter(tmp_path / "eagle3", target)


def test_a_chain_is_what_drafting_token_by_token_gives(target: PreTrainedModel) -> None:
    """As serving does it: the layer runs over the true rows, then over one drafted row after another."""
    head = new_head(target)
    ids = torch.randint(5, 300, (1, 12), generator=torch.Generator().manual_seed(1))
    states = hidden_states(target, ids, AUX)
    drafted = head.chain(ids, states, 3)
    for row in range(8):
        true_rows = row + 1
        features = head.fc(states[:, :true_rows, 32:])
        tokens = ids[:, 1 : true_rows + 1]
        for step in range(3):
            out = whole_sequence(head, tokens, features)
            torch.testing.assert_close(drafted[step].states[:, row], head.norm(out[:, -1]))
            features = torch.cat([features, out[:, -1:]], dim=1)
            tokens = ids[:, 1 : true_rows + 2 + step]


def whole_sequence(head: Eagle3, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """One plain causal pass of the layer."""
    embedded = nn.functional.embedding(tokens, head.embeddings)
    return head.midlayer(embedded, features, rotations(head.config, tokens.shape[1]), [])


# Figures
