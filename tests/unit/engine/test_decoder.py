"""The lean decoder against transformers, and the promise that a row's bits depend on its prefix only."""

from __future__ import annotations

import functools
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.engine.loading import load_decoder
from tests.unit.engine.tiny_models import (
    FAMILIES,
    NUM_BLOCKS,
    OTHER_TABLE,
    PROMPT,
    SCRATCH,
    TABLE,
    assert_prompt_and_tree_match,
    branch,
    chain,
    greedy,
    pack,
)

each_family = pytest.mark.parametrize("family", sorted(FAMILIES))
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@each_family
def test_logits_of_chunks_single_tokens_and_tree_rows_equal_transformers(family, tiny):
    assert_prompt_and_tree_match(tiny(family).load(), tiny(family))


@each_family
def test_the_plain_reference_gives_the_same_logits(family, tiny):
    assert_prompt_and_tree_match(tiny(family).load_plain(), tiny(family))


@each_family
def test_greedy_generation_equals_generate_token_for_token(family, tiny):
    decoder = tiny(family).load()
    expected = tiny(family).generate(PROMPT[:11], 32)
    assert greedy(decoder, decoder.new_cache(NUM_BLOCKS), PROMPT[:11], 32, TABLE) == expected
    assert len(set(expected)) > 4


@each_family
def test_bfloat16_logits_stay_near_those_of_float32(family, tiny):
    decoder = tiny(family).load("bfloat16")
    logits = decoder.forward(pack(chain(PROMPT), [TABLE]), decoder.new_cache(NUM_BLOCKS))
    exact = tiny(family).logits(PROMPT)
    assert logits.dtype == torch.float32
    assert float((logits - exact).square().mean().sqrt() / exact.square().mean().sqrt()) < 0.1


def plain_logits(decoder):
    """Logits of each position of the prompt, computed one row at a time in an empty cache."""
    cache = decoder.new_cache(NUM_BLOCKS)
    rows = [pack([row], [TABLE]) for row in chain(PROMPT)]
    return torch.cat([decoder.forward(row, cache) for row in rows])


@functools.cache
def decoder_and_plain_logits(model, dtype):
    decoder = model.load(dtype)
    return decoder, plain_logits(decoder)


@each_dtype
@each_family
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_row_has_the_same_bits_in_any_chunk_tree_and_company(family, dtype, tiny, data):
    decoder, expected = decoder_and_plain_logits(tiny(family), dtype)
    prefix = data.draw(st.integers(1, 40), label="prefix")
    depth = data.draw(st.integers(1, min(5, 45 - prefix)), label="depth")
    first = data.draw(st.integers(0, prefix - 1), label="first chunk ends before")
    others = data.draw(st.integers(0, 20), label="other session's rows")
    cache = decoder.new_cache(NUM_BLOCKS)
    for part, start in ((PROMPT[:first], 0), (PROMPT[first:prefix], first)):
        if part:
            logits = decoder.forward(pack(chain(part, start), [TABLE]), cache)
            assert torch.equal(logits, expected[start : start + len(part)])
    tree = branch(PROMPT[prefix : prefix + depth], prefix, SCRATCH[:depth])
    company = chain(PROMPT[::-1][:others], sequence=1)
    sibling = branch([7], prefix, SCRATCH[6:7])
    rows = company + sibling + tree
    wanted = list(range(len(rows) - depth, len(rows)))
    logits = decoder.forward(pack(rows, [TABLE, OTHER_TABLE], wanted), cache)
    assert torch.equal(logits, expected[prefix : prefix + depth])


@each_dtype
def test_accepted_nodes_copied_into_place_continue_as_if_decoded_there(dtype, tiny):
    decoder, expected = decoder_and_plain_logits(tiny("llama"), dtype)
    cache = decoder.new_cache(NUM_BLOCKS)
    decoder.forward(pack(chain(PROMPT[:30]), [TABLE]), cache)
    decoder.forward(pack(branch(PROMPT[30:35], 30, SCRATCH[:5]), [TABLE]), cache)
    targets = [TABLE[position // 16] * 16 + position % 16 for position in range(30, 35)]
    cache.copy_slots(np.array(SCRATCH[:5], dtype=np.int64), np.array(targets, dtype=np.int64))
    logits = decoder.forward(pack(chain(PROMPT[35:38], 35), [TABLE]), cache)
    assert torch.equal(logits, expected[35:38])


def test_logits_come_in_the_order_asked_for(tiny):
    decoder = tiny("qwen3").load()
    every = decoder.forward(pack(chain(PROMPT), [TABLE]), decoder.new_cache(NUM_BLOCKS))
    some = decoder.forward(pack(chain(PROMPT), [TABLE], [44, 0, 7]), decoder.new_cache(NUM_BLOCKS))
    assert torch.equal(some, every[[44, 0, 7]])
    none = decoder.forward(pack(chain(PROMPT), [TABLE], []), decoder.new_cache(NUM_BLOCKS))
    assert none.shape == (0, 97)


def test_settings_that_cannot_work_are_refused_by_name(tiny):
    folder = tiny("llama").folder
    with pytest.raises(ConfigError, match="dtype must be bfloat16, float32 or auto, got 'int4'"):
        load_decoder(folder, "int4", "cpu")
    with pytest.raises(ConfigError, match="device must be cpu, cuda or auto"):
        load_decoder(folder, "auto", "tpu")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("no room"), MemoryError),
        # What torch says where pinned memory cannot be had.
        (RuntimeError("CUDA error: out of memory"), MemoryError),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
    ],
)
def test_a_device_without_room_is_a_memory_error_wherever_it_is_noticed(raised, expected, tiny):
    decoder = tiny("llama").load()
    decoder.backend = Mock(
        launch=Mock(side_effect=raised), draft=Mock(side_effect=raised), forward=Mock(side_effect=raised)
    )
    for call in (decoder.launch, decoder.draft, decoder.forward):
        with pytest.raises(expected):
            call(None, None, None)
