"""Steps of static shape, recorded and replayed, against the compiled loops and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core.draft_policy import FixedGamma
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import SamplingParams
from paceline.engine.backends.torch.graphs import Unrecorded
from paceline.engine.backends.torch.kv import TorchKVCache
from paceline.engine.backends.torch.layers import TorchLayers
from paceline.engine.backends.torch.static_batch import MAX_ROWS, Bucket, plan_static
from paceline.engine.backends.torch.static_step import StaticStep
from paceline.engine.config import DecoderConfig, LlamaShape
from paceline.engine.hidden_states import NO_STATES
from paceline.engine.linear import Head, Linear
from paceline.engine.llama import LlamaLayer, LlamaWeights
from paceline.engine.rope import RopeFrequencies
from tests.support import engines
from tests.support.checkpoints import save_pair
from tests.unit.engine.backends.torch.tape import Recorder, TapeCapture
from tests.unit.engine.tiny_models import (
    FAMILIES,
    NUM_BLOCKS,
    PROMPT,
    SCRATCH,
    TABLE,
    Row,
    TinyModel,
    assert_prompt_and_tree_match,
    chain,
    greedy,
    pack,
)
from tests.unit.engine.traffic import ALL_BLOCKS, Traffic

each_family = pytest.mark.parametrize("family", sorted(FAMILIES))


@pytest.mark.parametrize("seed", range(4))
@each_family
def test_recorded_steps_give_the_logits_and_kv_of_the_compiled_path_in_any_batch(family, seed, tiny):
    tape = TapeCapture()
    static, grouped = tiny(family).load_torch(static=True, capture=tape), tiny(family).load_torch()
    compiled = tiny(family).load()
    caches = [decoder.new_cache(ALL_BLOCKS) for decoder in (static, grouped, compiled)]
    traffic = Traffic(seed)
    for _ in range(40):
        batch = traffic.step(int(traffic.rng.choice([1, 3, 20])))
        found = static.forward(batch, caches[0])
        torch.testing.assert_close(found, grouped.forward(batch, caches[1]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found, compiled.forward(batch, caches[2]), atol=1e-4, rtol=1e-4)
    for part in ("keys", "values"):
        ours, theirs = getattr(caches[0], part)[:, :ALL_BLOCKS], getattr(caches[2], part)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert tape.num_replayed > tape.num_recorded > 2


@each_family
def test_a_static_decoder_matches_transformers_in_chunks_trees_and_generation(family, tiny):
    decoder = tiny(family).load_torch(static=True, capture=TapeCapture())
    assert_prompt_and_tree_match(decoder, tiny(family))
    expected = tiny(family).generate(PROMPT[:11], 32)
    assert greedy(decoder, decoder.new_cache(NUM_BLOCKS), PROMPT[:11], 32, TABLE) == expected


def test_bfloat16_without_packing_as_on_cuda_stays_near_the_compiled_path(tiny):
    compiled = tiny("llama").load("bfloat16")
    static = tiny("llama").load_torch(torch.bfloat16, static=True, capture=TapeCapture())
    batches = [pack(chain(PROMPT[:30]), [TABLE]), pack(chain(PROMPT[30:], 30), [TABLE])]
    found, expected = (
        torch.cat([decoder.forward(batch, cache) for batch in batches])
        for decoder, cache in ((each, each.new_cache(NUM_BLOCKS)) for each in (static, compiled))
    )
    assert found.dtype == torch.float32
    assert float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt()) < 0.05


def test_nan_in_trash_foreign_blocks_and_unused_slots_reaches_nobody(tiny):
    decoder = tiny("mistral").load_torch(static=True)
    clean, dirty = decoder.new_cache(NUM_BLOCKS), decoder.new_cache(NUM_BLOCKS)
    dirty.keys.fill_(torch.nan)
    dirty.values.fill_(torch.nan)
    for batch in (
        pack(chain(PROMPT[:19]), [TABLE]),
        pack(
            [*chain(PROMPT[19:20], 19), Row(token_id=5, position=20, ancestors=(SCRATCH[0],), context_len=20)], [TABLE]
        ),
        pack(chain(PROMPT[20:23], 20), [TABLE]),
    ):
        found = decoder.forward(batch, dirty)
        assert torch.equal(found, decoder.forward(batch, clean))
        assert found.isfinite().all()


def test_padding_writes_into_the_trash_and_nowhere_else(tiny):
    decoder = tiny("llama").load_torch(static=True)
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT[:3]), [TABLE]), cache)
    written = cache.values[0].abs().sum(dim=(1, 3)).nonzero().tolist()
    assert written == [[TABLE[0], 0], [TABLE[0], 1], [TABLE[0], 2], [NUM_BLOCKS, 0]]


def test_accepted_nodes_move_within_the_torch_cache(tiny):
    decoder = tiny("qwen2").load_torch(static=True)
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT[:5]), [TABLE]), cache)
    before = cache.keys[:, TABLE[0], :, :, [4, 1]].clone()
    first = TABLE[0] * BLOCK_SIZE
    cache.copy_slots(np.array([first + 4, first + 1]), np.array([first + 1, SCRATCH[0]]))
    assert torch.equal(cache.keys[:, TABLE[0], :, :, 1], before[..., 0])
    assert torch.equal(cache.keys[:, SCRATCH[0] // BLOCK_SIZE, :, :, SCRATCH[0] % BLOCK_SIZE], before[..., 1])


def test_logits_of_one_step_outlive_the_next(tiny):
    decoder = tiny("llama").load_torch(static=True, capture=TapeCapture())
    cache = decoder.new_cache(NUM_BLOCKS)
    first = decoder.forward(pack(chain(PROMPT[:4]), [TABLE]), cache)
    kept = first.clone()
    decoder.forward(pack(chain(PROMPT[4:8], 4), [TABLE]), cache)
    assert torch.equal(first, kept)


def test_a_batch_too_large_for_any_bucket_takes_the_grouped_path(tiny):
    decoder = tiny("qwen3").load_torch(static=True)
    cache = decoder.new_cache(32)
    batch = pack(chain(PROMPT[:40] * 6 + PROMPT[:17]), [list(range(17))], [256])
    assert plan_static(batch) is None
    expected = tiny("qwen3").logits(PROMPT[:40] * 6 + PROMPT[:17])[256:]
    torch.testing.assert_close(decoder.forward(batch, cache), expected, atol=1e-4, rtol=1e-4)


def test_another_cache_starts_with_graphs_of_its_own(tiny):
    tape = TapeCapture()
    decoder = tiny("llama").load_torch(static=True, capture=tape)
    batch = pack(chain(PROMPT[:4]), [TABLE])
    for _ in range(2):
        cache = decoder.new_cache(NUM_BLOCKS)
        for _ in range(3):
            logits = decoder.forward(batch, cache)
        torch.testing.assert_close(logits, tiny("llama").logits(PROMPT[:4]), atol=1e-4, rtol=1e-4)
        assert cache.keys.any()
    assert (tape.num_recorded, tape.num_replayed) == (2, 4)


def meta_model():
    """An 8B-shaped layer without memory, which takes the ways of CUDA in kinds and shapes."""
    config = DecoderConfig(
        model_type="llama",
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        context_len=131072,
        longest_context_len=131072,
        eos_token_ids=(),
        num_layers=1,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
    )
    rope = RopeFrequencies(inverse=(1.0,) * 64, attention_scaling=1.0)
    shape = LlamaShape(hidden_size=4096, intermediate_size=14336, rms_norm_eps=1e-5, tied_head=False, rope=rope)

    def weight(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.bfloat16, device="meta")

    def norm(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float32, device="meta")

    layer = LlamaLayer(
        input_norm=norm(4096),
        query_norm=norm(0),
        key_norm=norm(0),
        post_norm=norm(4096),
        qkv=Linear(weight(48 * 128, 4096)),
        out=Linear(weight(4096, 4096)),
        gate_up=Linear(weight(2 * 14336, 4096)),
        down=Linear(weight(4096, 14336)),
    )
    weights = LlamaWeights(
        embedding=weight(128256, 4096), layers=(layer,), final_norm=norm(4096), head=Head(weight(128256, 4096))
    )
    return config, TorchLayers(config, shape, weights)


@pytest.mark.parametrize(
    "bucket",
    [
        Bucket(rows=1, lanes=1, lane_rows=1, blocks=8, nodes=0),
        Bucket(rows=MAX_ROWS, lanes=16, lane_rows=16, blocks=1024, nodes=64),
    ],
    ids=str,
)
def test_a_step_of_an_8b_shape_stays_on_its_device_in_the_kinds_of_cuda(bucket):
    config, layers = meta_model()
    cache = TorchKVCache(1, 8, 128, 64, "meta", torch.bfloat16)
    step = StaticStep(config, layers, cache, Unrecorded())
    step._inputs._device = step._inputs._device.to("meta")
    with torch.inference_mode(), Recorder("meta") as recorder:
        step._compute(bucket, NO_STATES)
    products = [(args, out) for func, args, _, out in recorder.calls if func.overloadpacket.__name__ == "linear"]
    assert [out.dtype for _, out in products] == [torch.bfloat16] * 4
    attention = [args for func, args, _, _ in recorder.calls if "scaled_dot_product" in func.overloadpacket.__name__]
    assert [part.dtype for args in attention for part in args[:3]] == [torch.bfloat16] * 3


def generate_pair(folder, monkeypatch, *, static: bool):
    """Texts and records of four sessions through both engines."""
    tape = TapeCapture()
    if static:
        monkeypatch.setattr(
            engines,
            "load_decoder",
            lambda path, *_: TinyModel(folder=path, oracle=None).load_torch(static=True, capture=tape),
        )
    pair = engines.EnginePair(*save_pair(folder), policy=FixedGamma(gamma=5))
    for index in range(4):
        prompt = [3 + index, *range(40, 40 + 20 * index), 7]
        pair.submit(str(index), prompt, SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
    pair.run()
    return pair.sessions, tape


def test_whole_engines_on_recorded_steps_give_the_texts_of_the_compiled_path(tmp_path, monkeypatch):
    expected, _ = generate_pair(tmp_path, monkeypatch, static=False)
    found, tape = generate_pair(tmp_path, monkeypatch, static=True)
    assert [each.token_ids for each in found.values()] == [each.token_ids for each in expected.values()]
    records = [each.result.speculation for each in found.values()]
    assert all(record.num_accepted_draft_tokens > 10 for record in records)
    assert tape.num_replayed > tape.num_recorded > 2
