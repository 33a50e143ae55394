"""Hidden states beside the KV: every decoder keeps those that transformers computes, wherever their slots go."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.backends.cpu.linear import PackedLinear
from paceline.engine.hidden_states import StateLayout
from tests.unit.engine.tiny_models import (
    NUM_BLOCKS,
    PROMPT,
    SCRATCH,
    SIZES,
    TABLE,
    branch,
    chain,
    pack,
    save_tiny,
)

HIDDEN, FUSED = SIZES["hidden_size"], 20
WAYS = {
    "compiled": lambda model: model.load(),
    "plain": lambda model: model.load_plain(),
}
each_way = pytest.mark.parametrize("way", sorted(WAYS))


def layout() -> StateLayout:
    weight = torch.randn(FUSED, 2 * HIDDEN, generator=torch.Generator().manual_seed(5)) / (2 * HIDDEN) ** 0.5
    return StateLayout(hidden_size=HIDDEN, layers=(1, 0), fuse=PackedLinear(weight), final=True)


def expected_states(model, token_ids) -> torch.Tensor:
    weight = torch.randn(FUSED, 2 * HIDDEN, generator=torch.Generator().manual_seed(5)) / (2 * HIDDEN) ** 0.5
    with torch.no_grad():
        streams = model.oracle(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    fused = torch.cat([streams[2][0], streams[1][0]], dim=-1) @ weight.T
    return torch.cat([fused, streams[-1][0]], dim=-1)


def states_at(cache, positions) -> torch.Tensor:
    slots = [TABLE[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in positions]
    return cache.states[torch.tensor(slots)]


def assert_states_match(decoder, model) -> None:
    decoder.keep_states(layout())
    cache = decoder.new_cache(NUM_BLOCKS)
    for first, last in ((0, 18), (18, 37)):
        decoder.forward(pack(chain(PROMPT[first:last], first), [TABLE], [0]), cache)
    path = PROMPT[37:41]
    decoder.forward(pack(branch(path, 37, SCRATCH[:4]), [TABLE]), cache)
    expected = expected_states(model, PROMPT[:41])
    torch.testing.assert_close(states_at(cache, range(37)), expected[:37], atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(cache.states[torch.tensor(SCRATCH[:4])], expected[37:], atol=2e-4, rtol=2e-4)


@each_way
def test_prompt_rows_and_tree_rows_leave_the_states_that_transformers_computes(way, tiny):
    assert_states_match(WAYS[way](tiny("llama")), tiny("llama"))


def test_other_families_keep_them_too(tmp_path):
    model = save_tiny(tmp_path, "phi", SIZES)
    assert_states_match(model.load(), model)


@each_way
def test_states_move_with_their_slots(way, tiny):
    decoder = WAYS[way](tiny("qwen3"))
    decoder.keep_states(layout())
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT), [TABLE]), cache)
    first, second = cache.states[3 * BLOCK_SIZE].clone(), cache.states[3 * BLOCK_SIZE + 1].clone()
    assert not torch.equal(first, second)
    slots = np.array([3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 1], np.int64)
    cache.copy_slots(slots, slots[::-1].copy())
    assert torch.equal(cache.states[3 * BLOCK_SIZE], second)
    assert torch.equal(cache.states[3 * BLOCK_SIZE + 1], first)


def test_keeping_states_changes_no_bit_of_the_logits(tiny):
    plain, keeping = tiny("llama").load(), tiny("llama").load()
    keeping.keep_states(layout())
    batch = pack(chain(PROMPT), [TABLE], [44, 3])
    caches = [decoder.new_cache(NUM_BLOCKS) for decoder in (plain, keeping)]
    assert torch.equal(plain.forward(batch, caches[0]), keeping.forward(batch, caches[1]))
    assert caches[0].states.nbytes == 0
    assert caches[1].nbytes == caches[0].nbytes + NUM_BLOCKS * BLOCK_SIZE * (FUSED + HIDDEN) * 4


@each_way
@pytest.mark.parametrize("layers", [(0,), (0, 1), (0, 2)])
def test_some_layers_alone_give_the_logits_of_a_model_made_of_them(way, layers, tiny):
    model = tiny("llama")
    oracle = copy.deepcopy(model.oracle)
    oracle.model.layers = torch.nn.ModuleList([oracle.model.layers[index] for index in layers])
    with torch.no_grad():
        expected = oracle(torch.tensor([PROMPT]), use_cache=False).logits[0]
    decoder = WAYS[way](model)
    logits = decoder.forward(pack(chain(PROMPT), [TABLE]), decoder.new_cache(NUM_BLOCKS), layers)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@each_way
def test_some_layers_alone_read_the_kv_of_whole_steps_and_leave_no_states(way, tiny):
    decoder = WAYS[way](tiny("llama"))
    decoder.keep_states(layout())
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT[:30]), [TABLE], []), cache)
    states, keys = cache.states.clone(), cache.keys[2].clone()
    rest = pack(chain(PROMPT[30:], 30), [TABLE])
    mixed = decoder.forward(rest, cache, (0, 1))
    assert torch.equal(cache.states, states)
    assert torch.equal(cache.keys[2], keys)
    # The first layers see the same, whichever run after them: whole steps and partial ones share their KV.
    whole = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT[:30]), [TABLE], []), whole, (0, 1))
    torch.testing.assert_close(decoder.forward(rest, whole, (0, 1)), mixed, atol=1e-5, rtol=1e-5)
