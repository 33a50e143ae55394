"""What a launched step is asked, on a device that answers as late as it may: answers are the CPU's, for one wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.draft_policy import FixedGamma
from paceline.core.messages import GenerateRequest, ModelIdentity
from paceline.core.pages import BLOCK_SIZE
from paceline.core.params import SamplingParams, SpeculationParams
from paceline.core.processors import Truncation
from paceline.core.target_events import Submit, TargetLimits
from paceline.engine.backends.cpu.step_kernels import choice_of
from paceline.engine.backends.cuda.kv import CudaKVCache
from paceline.engine.backends.cuda.pending import CudaPending
from paceline.engine.backends.cuda.platform import CudaPlatform
from paceline.engine.backends.interface import Backend
from paceline.engine.batch import Batch
from paceline.engine.decoder import Decoder
from paceline.engine.eagle3 import read_eagle3
from paceline.engine.loop import run_sync
from paceline.engine.model import Burst
from paceline.engine.pending import HostPending, Ranks, VerifyRequest
from paceline.engine.target import TargetEngine
from paceline.forest import NONE
from tests.support.eagle import save_eagle3
from tests.unit.engine.cuda.interpreted import DEVICE
from tests.unit.engine.cuda.lazy_stream import LazyStream
from tests.unit.engine.tiny_models import (
    FAMILIES,
    NUM_BLOCKS,
    OTHER_TABLE,
    PROMPT,
    SCRATCH,
    TABLE,
    VOCAB,
    TinyModel,
    branch,
    chain,
    pack,
    save_tiny,
)

# By Triton's interpreter.
pytestmark = pytest.mark.full

LOGIT_BYTES = 4 * VOCAB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """One layer: what is asked comes behind them."""
    return save_tiny(tmp_path_factory.mktemp("one"), "llama", {**FAMILIES["llama"], "num_hidden_layers": 1})


@pytest.fixture(scope="module")
def prepared(model) -> tuple[Decoder, LazyStream]:
    stream = LazyStream()
    return model.load_on(CudaPlatform(DEVICE, stream)), stream


def choices_of(*seeds: int) -> np.ndarray:
    """Greedy where the seed is 0, else with temperature and filters."""
    sampled = Truncation(greedy=False, inverse_temperature=1.25, log_min_p=-4.0, top_p=0.9)
    return np.concatenate([choice_of(sampled if seed else Truncation(), seed) for seed in seeds])


def two_trees() -> Batch:
    """Two sessions of 6 and 5 committed tokens: a root and a chain of two guesses, and a root and two siblings."""
    roots = [chain([PROMPT[5]], 5)[0], chain([PROMPT[14]], 4, sequence=1)[0]]
    first = branch(PROMPT[6:8], 6, SCRATCH[:2])
    siblings = [branch([token], 5, [slot], sequence=1)[0] for token, slot in ((7, SCRATCH[4]), (9, SCRATCH[5]))]
    return pack([roots[0], *first, roots[1], *siblings], [TABLE, OTHER_TABLE])


def read_prompts(decoder, cache):
    rows = chain(PROMPT[:5]) + chain(PROMPT[10:14], sequence=1)
    decoder.launch(pack(rows, [TABLE, OTHER_TABLE], []), cache, None)


def test_tokens_down_guesses_are_the_cpus_for_four_bytes_a_row_and_one_wait(prepared):
    decoder, stream = prepared
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.prepare(8, cache)
    read_prompts(decoder, cache)
    # Guesses that the target would take, so that it is followed down them.
    tokens = np.array([*PROMPT[6:8], 7, 9], np.int32)
    walks = VerifyRequest(
        rows=np.array([0, 3]),
        positions=np.array([6, 5]),
        choices=choices_of(0, 2**40 + 5),
        starts=np.array([0, 2]),
        stops=np.array([2, 4]),
        tokens=tokens,
        parents=np.array([-1, 0, -1, -1], np.int32),
    )
    for _ in range(2):
        stream.work_until(stream.num_launched)
        stream.forget()
        pending = decoder.launch(two_trees(), cache, walks)
        assert stream.num_waits == 0
        found = pending.follow(walks)
        assert (stream.num_waits, len(stream.sent), stream.fetched, stream.num_replayed) == (1, 1, [4 * 6], 1)
        expected = HostPending(pending.logits(range(6))).follow(walks)
        assert np.array_equal(found.counts, expected.counts)
        assert np.array_equal(found.rivals, expected.rivals)
        for row, count in zip(walks.rows, expected.counts, strict=True):
            assert np.array_equal(found.tokens[row : row + count], expected.tokens[row : row + count])
        # Once more with guesses that come true.
        tokens[0], tokens[3] = found.tokens[0], found.tokens[3]
    assert found.counts.tolist() != [1, 1]


def test_rows_that_nobody_follows_or_changes_come_only_when_they_are_asked_for(prepared):
    decoder, stream = prepared
    cache = decoder.new_cache(NUM_BLOCKS)
    read_prompts(decoder, cache)
    nothing, none = np.zeros(0, np.int32), np.zeros(1, np.int64)
    walks = VerifyRequest(none, np.array([6]), choices_of(0), none, none, nothing, nothing, others=np.array([3, 4]))
    stream.work_until(stream.num_launched)
    stream.forget()
    pending = decoder.launch(two_trees(), cache, walks)
    pending.follow(walks)
    changed = pending.logits([4, 3])
    assert (stream.num_waits, stream.fetched) == (1, [4, LOGIT_BYTES * 2])
    asked = pending.logits([1, 2])
    assert stream.fetched[2:] == [LOGIT_BYTES * 2]
    whole = pending.logits(range(6))
    assert np.array_equal(changed, whole[[4, 3]])
    assert np.array_equal(asked, whole[[1, 2]])


def test_rankings_are_the_cpus_for_128_bytes_a_row_and_rows_of_others_come_with_them(prepared):
    decoder, stream = prepared
    cache = decoder.new_cache(NUM_BLOCKS)
    read_prompts(decoder, cache)
    ranks = Ranks(np.array([3, 0, 5]), np.array([5, 6, 6]), choices_of(3, 0, 2**63))
    stream.work_until(stream.num_launched)
    stream.forget()
    pending = decoder.launch(two_trees(), cache, ranks)
    found = pending.rank(*ranks)
    others = pending.logits([1, 4])
    assert (stream.num_waits, len(stream.sent)) == (1, 1)
    assert stream.fetched == [128 * 3, LOGIT_BYTES * 3]
    whole = pending.logits(range(6))
    expected = HostPending(whole).rank(*ranks)
    assert np.array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_allclose(found.confidences, expected.confidences, atol=1e-6)
    assert np.array_equal(found.usable, expected.usable)
    assert np.array_equal(others, whole[[1, 4]])
    others[:] = 0.0


def test_whoever_announced_nothing_gets_all_logits_for_one_wait(prepared):
    decoder, stream = prepared
    cache = decoder.new_cache(NUM_BLOCKS)
    read_prompts(decoder, cache)
    stream.work_until(stream.num_launched)
    stream.forget()
    pending = decoder.launch(two_trees(), cache, None)
    ranks = Ranks(np.array([2]), np.array([8]), choices_of(0))
    found = pending.rank(*ranks)
    assert (stream.num_waits, stream.fetched) == (1, [LOGIT_BYTES * 6])
    assert np.array_equal(found.token_ids, HostPending(pending.logits(range(6))).rank(*ranks).token_ids)


def test_steps_of_which_nothing_is_asked_are_not_waited_for(prepared):
    decoder, stream = prepared
    cache = decoder.new_cache(NUM_BLOCKS)
    stream.work_until(stream.num_launched)
    stream.forget()
    read_prompts(decoder, cache)
    assert (stream.num_waits, stream.fetched) == (0, [])


@contextmanager
def products() -> Iterator[list[int]]:
    """Notes the rows of each product of torch's."""
    rows: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ in ("linear", "mm", "addmm"):
                rows.append(len(args[0]))
            return func(*args, **(kwargs or {}))

    with Watch():
        yield rows


def test_a_layer_launches_four_products_and_six_kernels(tiny, launches):
    stream = LazyStream()
    decoder = tiny("mistral").load_on(CudaPlatform(DEVICE, stream))
    cache = decoder.new_cache(NUM_BLOCKS)
    with products() as rows:
        decoder.forward(pack(chain(PROMPT[:2]), [TABLE]), cache)
    layer = ["_add_norm", "_rope_store", "_attend", "_join", "_add_norm", "_silu_mul"]
    assert launches == [*layer * decoder.config.num_layers, "_add_norm"]
    assert len(rows) == 4 * decoder.config.num_layers + 1


@pytest.mark.parametrize("recorded", [True, False])
def test_a_burst_is_two_copies_in_a_launch_a_level_and_one_wait(recorded, prepared):
    decoder, stream = prepared
    burst = Burst(
        Ranks(np.array([2, 0, 4]), np.array([8, 6, 6]), choices_of(0, 2**40 + 5, 0)),
        np.array([[*SCRATCH[6:8], 150], [151, NONE, 152]], np.int32),
        3,
    )
    caches = [decoder.new_cache(NUM_BLOCKS) for _ in range(2)]
    read_prompts(decoder, caches[0])
    with torch.inference_mode():
        expected = Backend.draft(decoder.backend, two_trees(), caches[0], decoder.states, burst)
    if recorded:
        decoder.prepare(4, caches[1], drafts=True)
    read_prompts(decoder, caches[1])
    poison(caches[1], burst.kv[burst.kv != NONE])
    stream.work_until(stream.num_launched)
    stream.forget()
    found = decoder.draft(two_trees(), caches[1], burst)
    assert (stream.num_waits, len(stream.sent), stream.num_replayed) == (1, 2, 2 * recorded)
    assert stream.fetched == [128 * 3, LOGIT_BYTES * 3, 128 * 2 * 4]
    assert np.array_equal(found.token_ids, expected.token_ids)
    np.testing.assert_allclose(found.confidences, expected.confidences, atol=1e-6)
    assert found.token_ids[2, :, 0].tolist()[1] == NONE
    assert np.array_equal(found.pending.logits([1]), expected.pending.logits([1]))


def poison(cache: CudaKVCache, slots: np.ndarray) -> None:
    """What levels have not written yet may hold anything."""
    blocks, offsets = torch.from_numpy(slots // BLOCK_SIZE), torch.from_numpy(slots % BLOCK_SIZE)
    cache.keys[:, blocks, :, :, offsets] = torch.nan
    cache.values[:, blocks, :, offsets] = torch.nan


def texts_of(decoder: Decoder, stop: int) -> list[list[int]]:
    """Of three sessions, the second of which may end by a token; all that a verifier does for them."""
    identity = ModelIdentity(name="one", vocab_hash="", vocab_size=VOCAB, context_len=64)
    engine = TargetEngine(
        decoder=decoder,
        identity=identity,
        num_blocks=8,
        limits=TargetLimits(max_num_seqs=4, max_num_batched_tokens=16),
        policy=FixedGamma(gamma=0),
        clock=lambda: 0.0,
    )
    ways = ({"temperature": 0.0}, {"temperature": 0.9, "stop_token_ids": (stop,)}, {"temperature": 0.7, "top_p": 0.9})
    for number, way in enumerate(ways):
        sampling = SamplingParams(max_tokens=4 + number, seed=number, ignore_eos=True, **way)
        request = GenerateRequest(
            session_id=str(number),
            epoch=1,
            prompt_token_ids=tuple(PROMPT[number : number + 4]),
            sampling=sampling,
            speculation=SpeculationParams(),
        )
        engine.handle(Submit(request=request, number=number))
    texts: list[list[int]] = [[], [], []]
    while engine.num_sessions:
        for number, _, token_ids, _ in run_sync(engine.step()).commit:
            texts[number] += token_ids
    return texts


def test_the_next_step_is_launched_before_the_tokens_of_this_one_are_read(prepared, monkeypatch):
    decoder, stream = prepared
    stream.work_until(stream.num_launched)
    stream.forget()
    texts = texts_of(decoder, stop=VOCAB)
    # The prompts' step is followed by one that is planned by what it brought, and nothing comes behind the last one.
    assert [lead > 0 for lead in stream.leads] == [False, True, True, True, True, False]
    assert stream.fetched == [4 * 3] * 4 + [4 * 2, 4]
    assert len(stream.sent) == 6
    # A stop token ends a text whose next row is on its way.
    stop = texts[1][2]
    kept = texts[1][: texts[1].index(stop) + 1]
    assert texts_of(decoder, stop) == [texts[0], kept, texts[2]]
    monkeypatch.setattr(CudaPending, "runs_ahead", False)
    stream.forget()
    assert texts_of(decoder, stop) == [texts[0], kept, texts[2]]
    assert stream.leads == [0] * 6


def test_a_heads_burst_takes_the_states_of_the_rows_above_on_the_device(tiny, tmp_path):
    model = tiny("llama")
    stream = LazyStream()
    decoder = read_eagle3(
        save_eagle3(tmp_path / "head", model.folder), model.folder, "float32", CudaPlatform(DEVICE, stream)
    )
    features = torch.randn(5, decoder.feature_width, generator=torch.Generator().manual_seed(1)).numpy()
    batch = replace(pack(chain(PROMPT[:5]), [TABLE], [4]), features=features)
    burst = Burst(
        Ranks(np.array([0]), np.array([6]), choices_of(0)), np.array([SCRATCH[:1], SCRATCH[1:2]]).astype(np.int32), 2
    )
    caches = [decoder.new_cache(NUM_BLOCKS) for _ in range(2)]
    with torch.inference_mode():
        expected = Backend.draft(decoder.backend, batch, caches[0], decoder.states, burst)
    stream.work_until(stream.num_launched)
    stream.forget()
    found = decoder.draft(batch, caches[1], burst)
    assert stream.num_waits == 1
    assert np.array_equal(found.token_ids, expected.token_ids)
    torch.testing.assert_close(caches[1].states[SCRATCH[:2]], caches[0].states[SCRATCH[:2]])
