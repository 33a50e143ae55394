"""EAGLE-3 heads against a forward pass of the tests' own, and checkpoints that do not fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.checkpoints.families import is_eagle3
from paceline.core.errors import ConfigError
from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cpu.platform import CpuPlatform
from paceline.engine.batch import Batch
from paceline.engine.eagle3 import EagleConfig, load_eagle3, load_fusion, read_eagle3, states_hash
from tests.support.eagle import eagle_forward, save_eagle3
from tests.unit.engine.plain_reference import PlainPlatform
from tests.unit.engine.tiny_models import FAMILIES, NUM_BLOCKS, PROMPT, SCRATCH, TABLE, branch, chain, pack

FAMILY = "mistral"
THETA = FAMILIES[FAMILY]["rope_parameters"]["rope_theta"]
LAYOUTS = {
    "safeailab": {},
    "whole_vocabulary": {"draft_vocab": None},
}


def with_features(batch: Batch, features: torch.Tensor) -> Batch:
    return replace(batch, features=features.float().numpy().copy())


def features_of(model, folder, token_ids) -> torch.Tensor:
    with torch.no_grad():
        streams = model.oracle(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    fusion = load_file(folder / "model.safetensors")["fc.weight"]
    return torch.cat([streams[layer + 1][0] for layer in (0, 1, 1)], dim=-1) @ fusion.T


def embedding_of(model) -> torch.Tensor:
    return model.oracle.get_input_embeddings().weight.detach()


@pytest.mark.parametrize("platform", [CpuPlatform(), PlainPlatform()], ids=["cpu", "plain"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_prompt_rows_and_drafted_rows_equal_an_independent_forward(layout, platform, tiny, tmp_path):
    model = tiny(FAMILY)
    folder = save_eagle3(tmp_path / "head", model.folder, **LAYOUTS[layout])
    decoder = read_eagle3(folder, model.folder, "float32", platform)
    features = features_of(model, folder, PROMPT)[:30]
    tokens, path = PROMPT[1:31], [5, 17, 40]
    cache = decoder.new_cache(NUM_BLOCKS)
    for first, last in ((0, 13), (13, 30)):
        batch = pack(chain(tokens[first:last], first), [TABLE])
        known = decoder.forward(with_features(batch, features[first:last]), cache)
    drafted = []
    above = cache.states[TABLE[29 // BLOCK_SIZE] * BLOCK_SIZE + 29 % BLOCK_SIZE]
    for depth in range(3):
        row = branch(path, 30, SCRATCH[:3])[depth]
        drafted.append(decoder.forward(with_features(pack([row], [TABLE]), above[None]), cache))
        above = cache.states[SCRATCH[depth]]
    expected, _ = eagle_forward(folder, embedding_of(model), [*tokens, *path], features, rope_theta=THETA, num_own=3)
    tensors = load_file(folder / "model.safetensors")
    ids = torch.arange(len(expected[0])) + tensors.get("d2t", torch.zeros(len(expected[0]), dtype=torch.int64))
    found = torch.cat([known, *drafted])
    torch.testing.assert_close(found[:, ids], expected[13:], atol=2e-4, rtol=2e-4)
    unknown = torch.ones(found.shape[1], dtype=torch.bool).index_fill_(0, ids, False)
    assert bool((found[:, unknown] == -torch.inf).all())


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_head_without_a_matrix_of_its_own_takes_its_targets(layout, tiny, tmp_path):
    """sglang #27908: heads of the hub without `lm_head.weight`; with d2t, the rows of the ids that they guess."""
    model = tiny(FAMILY)
    folder = save_eagle3(tmp_path / "head", model.folder, **LAYOUTS[layout])
    tensors = load_file(folder / "model.safetensors")
    vocab = model.oracle.get_output_embeddings().weight.detach()
    draft_ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"] if "d2t" in tensors else slice(None)
    logits = []
    for head in ({"lm_head.weight": vocab[draft_ids].contiguous()}, {}):
        rest = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
        save_file({**rest, **head}, folder / "model.safetensors")
        decoder = load_eagle3(folder, model.folder, "float32", "cpu")
        batch = with_features(pack(chain(PROMPT[1:31]), [TABLE]), features_of(model, folder, PROMPT)[:30])
        logits.append(decoder.forward(batch, decoder.new_cache(NUM_BLOCKS)))
    assert torch.equal(*logits)


def test_the_verifier_keeps_the_fused_states_of_the_layers_that_the_head_names(tiny, tmp_path):
    model = tiny(FAMILY)
    folder = save_eagle3(tmp_path / "head", model.folder)
    decoder = model.load()
    decoder.keep_states(load_fusion(folder, decoder))
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT), [TABLE]), cache)
    slots = torch.tensor([TABLE[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in range(45)])
    torch.testing.assert_close(cache.states[slots], features_of(model, folder, PROMPT), atol=2e-4, rtol=2e-4)


def test_rows_have_the_same_bits_in_any_batch(tiny, tmp_path):
    model = tiny(FAMILY)
    folder = save_eagle3(tmp_path / "head", model.folder)
    decoder = load_eagle3(folder, model.folder, "float32", "cpu")
    features = torch.randn(45, decoder.feature_width, generator=torch.Generator().manual_seed(1))
    whole = decoder.forward(with_features(pack(chain(PROMPT), [TABLE]), features), decoder.new_cache(NUM_BLOCKS))
    cache = decoder.new_cache(NUM_BLOCKS)
    rows = [
        decoder.forward(with_features(pack([row], [TABLE]), features[index : index + 1]), cache)
        for index, row in enumerate(chain(PROMPT))
    ]
    assert torch.equal(torch.cat(rows), whole)


def test_layers_that_a_config_does_not_name_are_those_of_the_paper(tiny, tmp_path):
    folder = save_eagle3(tmp_path / "head", tiny(FAMILY).folder, layer_ids=None)
    assert EagleConfig.from_folder(folder).taps(32) == (1, 15, 28)
    assert EagleConfig.from_folder(folder).taps(8) == (1, 3, 4)
    with pytest.raises(ConfigError, match="eagle_aux_hidden_state_layer_ids"):
        load_fusion(folder, tiny(FAMILY).load())


def test_a_fusion_has_a_fingerprint_of_its_own(tiny, tmp_path):
    folders = [save_eagle3(tmp_path / f"{n}", tiny(FAMILY).folder, seed=seed) for n, seed in enumerate((0, 0, 1))]
    hashes = [states_hash(folder) for folder in folders]
    assert hashes[0] == hashes[1] != hashes[2]
    assert is_eagle3(folders[0])
    assert not is_eagle3(tiny(FAMILY).folder)


def damaged(folder, name, change):
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("d2t", lambda offsets: offsets + 90, "d2t: leads to ids outside the vocabulary of 97"),
        ("d2t", lambda offsets: offsets * 0, "t2d: contradicts d2t"),
        ("t2d", lambda known: ~known, "t2d: contradicts d2t"),
        ("lm_head.weight", lambda weight: weight[:-1], "lm_head.weight"),
        ("midlayer.self_attn.q_proj.weight", lambda weight: weight[:, :-1], "q_proj.weight"),
        ("midlayer.hidden_norm.weight", lambda weight: weight[:-1], "hidden_norm.weight"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused_by_name(name, change, message, tiny, tmp_path):
    folder = save_eagle3(tmp_path / "head", tiny(FAMILY).folder)
    damaged(folder, name, change)
    with pytest.raises(ConfigError, match=message):
        load_eagle3(folder, tiny(FAMILY).folder, "float32", "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no EAGLE-3 head"),
        ({"norm_before_fc": True}, "norm_before_fc: EAGLE-3 heads with this option are not served"),
        ({"norm_before_residual": True}, "norm_before_residual: EAGLE-3 heads with this option are not served"),
        ({"speculators_model_type": "eagle3"}, "heads of speculators are not served; SpecForge's"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}}, "must be 3 of the target's 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, "must be 3 of the target's 3 layers"),
    ],
)
def test_configs_that_cannot_be_served_are_refused_by_name(change, message, tiny, tmp_path):
    folder = save_eagle3(tmp_path / "head", tiny(FAMILY).folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_fusion(folder, tiny(FAMILY).load())


def test_a_head_without_maps_must_guess_the_whole_vocabulary(tiny, tmp_path):
    folder = save_eagle3(tmp_path / "head", tiny(FAMILY).folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({key: tensors[key] for key in tensors if key not in ("d2t", "t2d")}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="lacks d2t, and guesses 61 of 97 ids"):
        load_eagle3(folder, tiny(FAMILY).folder, "float32", "cpu")
