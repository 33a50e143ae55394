"""Whole steps on a device that answers as late as it may: logits, KV and states are those of the plain reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from paceline.core.pages import BLOCK_SIZE
from paceline.drafting.medusa import MedusaSource
from paceline.engine.backends.cuda import backend, plan
from paceline.engine.backends.cuda.kv import CudaKVCache
from paceline.engine.backends.cuda.plan import ROWS
from paceline.engine.backends.cuda.platform import CudaPlatform
from paceline.engine.backends.cuda.stream import Stream
from paceline.engine.backends.generic.backend import GenericBackend
from paceline.engine.config import DecoderConfig
from paceline.engine.decoder import Decoder
from paceline.engine.eagle3 import read_eagle3
from paceline.engine.hidden_states import StateLayout
from tests.support.eagle import save_eagle3
from tests.unit.engine.backends.generic.test_backend import WITHOUT_GQA
from tests.unit.engine.cuda.interpreted import DEVICE
from tests.unit.engine.cuda.lazy_stream import LazyStream
from tests.unit.engine.plain_reference import PlainPlatform
from tests.unit.engine.tiny_models import (
    FAMILIES,
    NUM_BLOCKS,
    PROMPT,
    SCRATCH,
    SIZES,
    TABLE,
    Row,
    TinyModel,
    branch,
    chain,
    pack,
    save_tiny,
)
from tests.unit.engine.traffic import ALL_BLOCKS, Traffic

HIDDEN = SIZES["hidden_size"]
MOST_ROWS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Of a family with norms of heads; two layers, since an interpreter takes its time."""
    options = {**FAMILIES["qwen3"], "num_hidden_layers": 2}
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3", options)


def on_device(model: TinyModel) -> tuple[Decoder, LazyStream]:
    stream = LazyStream()
    return model.load_on(CudaPlatform(DEVICE, stream)), stream


def assert_same_kv(ours, theirs, num_blocks):
    for part in ("keys", "values", "states"):
        found, expected = getattr(ours, part), getattr(theirs, part)
        found = found[: len(expected)] if part == "states" else found[:, :num_blocks]
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_recorded_steps_have_the_logits_and_the_kv_of_the_reference_in_any_batch(family, tiny):
    model = tiny(family)
    (decoder, stream), plain = on_device(model), model.load_plain()
    caches = [each.new_cache(ALL_BLOCKS) for each in (decoder, plain)]
    decoder.prepare(MOST_ROWS, caches[0])
    traffic, stream.num_replayed = Traffic(4), 0
    for most_rows in (1, 3, 8):
        batch = traffic.step(most_rows)
        found = decoder.forward(batch, caches[0])
        torch.testing.assert_close(found.cpu(), plain.forward(batch, caches[1]), atol=1e-4, rtol=1e-4)
    assert_same_kv(*caches, ALL_BLOCKS)
    assert stream.num_replayed > 0


def test_steps_larger_than_any_recording_run_the_same_kernels(model, monkeypatch):
    monkeypatch.setattr(plan, "ROWS", (1, 2, 4, 8))
    monkeypatch.setattr(backend, "ROWS", (1, 2, 4, 8))
    (decoder, stream), plain = on_device(model), model.load_plain()
    caches = [each.new_cache(NUM_BLOCKS) for each in (decoder, plain)]
    decoder.prepare(512, caches[0])
    stream.forget()
    batch = pack(chain(PROMPT[:21]), [TABLE], [20, 3])
    torch.testing.assert_close(decoder.forward(batch, caches[0]).cpu(), plain.forward(batch, caches[1]))
    assert_same_kv(*caches, NUM_BLOCKS)
    assert stream.num_replayed == 0


def test_hidden_states_are_kept_where_the_rows_are(model):
    (decoder, _), plain = on_device(model), model.load_plain()
    weight = torch.randn(20, 2 * HIDDEN, generator=torch.Generator().manual_seed(5))
    for each in (decoder, plain):
        fuse = each.platform.linear(weight.to(each.device))
        each.keep_states(StateLayout(hidden_size=HIDDEN, layers=(1, 0), fuse=fuse, final=True))
    caches = [each.new_cache(NUM_BLOCKS) for each in (decoder, plain)]
    decoder.prepare(MOST_ROWS, caches[0])
    for batch in (pack(chain(PROMPT[:6]), [TABLE]), pack(branch(PROMPT[6:9], 6, SCRATCH[:3]), [TABLE])):
        for each, cache in zip((decoder, plain), caches, strict=True):
            each.forward(batch, cache)
    assert_same_kv(*caches, NUM_BLOCKS)
    assert bool(caches[1].states.any())


def test_some_layers_run_alone_and_leave_the_states_of_the_others(model):
    (decoder, _), plain = on_device(model), model.load_plain()
    caches = [each.new_cache(NUM_BLOCKS) for each in (decoder, plain)]
    batch = pack(chain(PROMPT[:5]), [TABLE])
    found, expected = (each.forward(batch, cache, (1,)) for each, cache in zip((decoder, plain), caches, strict=True))
    torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)
    assert_same_kv(*caches, NUM_BLOCKS)


def test_a_head_drafts_from_features_in_recorded_steps(tiny, tmp_path):
    model = tiny("llama")
    folder = save_eagle3(tmp_path / "head", model.folder)
    stream = LazyStream()
    decoder, plain = (
        read_eagle3(folder, model.folder, "float32", platform)
        for platform in (CudaPlatform(DEVICE, stream), PlainPlatform())
    )
    caches = [each.new_cache(NUM_BLOCKS) for each in (decoder, plain)]
    decoder.prepare(MOST_ROWS, caches[0])
    stream.forget()
    features = torch.randn(7, decoder.feature_width, generator=torch.Generator().manual_seed(1)).numpy()
    batches = (pack(chain(PROMPT[:5]), [TABLE]), pack(branch(PROMPT[5:7], 5, SCRATCH[:2]), [TABLE]))
    for batch, rows in zip(batches, (features[:5], features[5:]), strict=True):
        found, expected = (
            each.forward(replace(batch, features=rows.copy()), cache)
            for each, cache in zip((decoder, plain), caches, strict=True)
        )
        torch.testing.assert_close(found.cpu(), expected, atol=1e-4, rtol=1e-4)
    assert_same_kv(*caches, NUM_BLOCKS)
    assert stream.num_replayed == 2


def test_moves_are_made_before_the_next_step_writes_and_states_are_read_where_they_will_be(model):
    decoder, stream = on_device(model)
    decoder.keep_states(StateLayout(hidden_size=HIDDEN, final=True))
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT[:5]), [TABLE]), cache)
    first = TABLE[0] * BLOCK_SIZE
    before, states = (each[:, TABLE[0]].clone() for each in (cache.keys, cache.values)), cache.states.clone()
    keys, values = before
    # The second call reads what the first one has not moved yet.
    cache.apply_moves([(first + 4, first + 1), (first + 3, SCRATCH[0])])
    cache.apply_moves([(first + 1, first + 9)])
    slots = [first + 1, SCRATCH[0], first + 9]
    expected = states[[first + 4, first + 3, first + 4]].float().cpu().numpy()
    assert np.array_equal(cache.features(slots), expected)
    stream.forget()
    decoder.forward(pack(chain(PROMPT[10:11], 10), [TABLE]), cache)
    assert np.array_equal(cache.features(slots), expected)
    assert torch.equal(cache.keys[:, TABLE[0], :, :, 1], keys[..., 4])
    assert torch.equal(cache.values[:, TABLE[0], :, 9], values[:, :, 4])
    assert torch.equal(cache.keys[:, SCRATCH[0] // BLOCK_SIZE, :, :, SCRATCH[0] % BLOCK_SIZE], keys[..., 3])
    assert len(stream.sent) == 1


def test_a_lane_that_would_see_too_many_nodes_is_divided():
    path = tuple(range(100, 164))
    rows = [Row(token_id=2, position=3, ancestors=(path[-1],), context_len=3)]
    rows += [Row(token_id=2, position=2 + len(path), ancestors=path, context_len=3)]
    rows += [Row(token_id=2, position=3, ancestors=(99,), context_len=3)]
    arrays = plan.field_arrays(pack(rows, [[0]]), 4, 2, 999)
    assert arrays["lane_rows"].tolist()[:2] == [[0, 1, -1, -1], [2, -1, -1, -1]]
    assert arrays["lane_nodes"].tolist() == [64, 1, 0, 0]
    assert arrays["slots"].tolist() == [163, 163, 99, 999]


@pytest.mark.parametrize(("rows", "computed"), [(1, 1), (3, 4), (5, 8), (9, 16), (320, 320), (511, 512), (900, 900)])
def test_rows_are_padded_by_less_than_eight(rows, computed):
    assert plan.padded(rows) == computed
    assert len(ROWS) == 67


def test_other_families_take_the_kernel_through_the_platform(tmp_path):
    save_tiny(tmp_path, "gpt_neox", WITHOUT_GQA)
    # While it loads, a model's logits with our attention are compared with transformers' own, in chunks and a tree.
    platform = CudaPlatform(DEVICE, Stream(DEVICE))
    backend = GenericBackend.load(tmp_path, DecoderConfig.from_folder(tmp_path), torch.float32, platform)
    decoder = Decoder(backend)
    cache = decoder.new_cache(NUM_BLOCKS)
    assert isinstance(cache, CudaKVCache)
    decoder.forward(pack(chain(PROMPT[:5]), [TABLE]), cache)
    first = TABLE[0] * BLOCK_SIZE
    cache.apply_moves([(first + 4, first + 9)])
    decoder.forward(pack(chain(PROMPT[10:11], 10), [TABLE]), cache)
    for part in (cache.keys[:, TABLE[0]].mT, cache.values[:, TABLE[0]]):
        assert part[:, :, 4].any()
        assert torch.equal(part[:, :, 9], part[:, :, 4]), "moves are made before a step reads what they bring"


class NotedHeads:
    """Medusa heads that note the states which they get."""

    hidden_size = HIDDEN

    def __len__(self):
        return 1

    def __call__(self, states, count):
        self.states = states
        return torch.zeros(count, len(states), SIZES["vocab_size"])


def test_heads_get_the_states_of_tokens_whose_moves_wait(model):
    decoder, _ = on_device(model)
    decoder.keep_states(StateLayout(hidden_size=HIDDEN, final=True))
    cache, heads = decoder.new_cache(NUM_BLOCKS), NotedHeads()
    decoder.forward(pack(chain(PROMPT[:5]), [TABLE]), cache)
    first = TABLE[0] * BLOCK_SIZE
    cache.apply_moves([(first + 4, first + 9)])
    session = SimpleNamespace(tokens=PROMPT[:11], pages=SimpleNamespace(num_missing=1, slot=lambda at: first + at))
    turn = Mock(follower=session, limit=0)
    source = MedusaSource(heads)
    source.attach(cache, None)
    source.grow([turn])
    assert torch.equal(heads.states[0], cache.states[first + 4].float())


def test_moves_of_a_usual_number_find_their_kernels_compiled(model, launches):
    decoder, stream = on_device(model)
    decoder.prepare(1, decoder.new_cache(1))
    stream.work_until(stream.num_launched)
    assert launches.count("_move") == 2
