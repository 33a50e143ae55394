"""The account of memory: what is named adds up to what the process holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.pages import BLOCK_SIZE
from paceline.engine.budget import MIB, account, draft_scratch_blocks, plan_memory, target_scratch_blocks
from paceline.engine.loading import load_decoder
from paceline.engine.sizing import model_needs
from tests.support.checkpoints import save_pair
from tests.support.engines import EnginePair
from tests.unit.engine.tiny_models import FAMILIES, SIZES, save_tiny


def test_on_the_host_the_parts_add_up_to_the_process() -> None:
    budget = account(
        weight_bytes=20 * MIB,
        block_bytes=MIB // 4,
        num_blocks=400,
        num_scratch_blocks=40,
        process_bytes=500 * MIB,
        on_host=True,
    )
    assert budget.total_bytes == 500 * MIB
    assert budget.loggable() == {
        "weights_mib": 20.0,
        "kv_pages_mib": 100.0,
        "scratch_mib": 10.0,
        "other_mib": 370.0,
        "total_mib": 500.0,
        "kv_tokens": 400 * BLOCK_SIZE,
    }


def test_an_accelerators_memory_comes_on_top_of_the_process() -> None:
    budget = account(
        weight_bytes=20 * MIB,
        block_bytes=MIB,
        num_blocks=100,
        num_scratch_blocks=10,
        process_bytes=500 * MIB,
        on_host=False,
    )
    assert budget.other_bytes == 500 * MIB
    assert budget.total_bytes == 630 * MIB


def test_a_process_smaller_than_its_parts_has_no_negative_rest() -> None:
    budget = account(
        weight_bytes=MIB, block_bytes=MIB, num_blocks=1, num_scratch_blocks=1, process_bytes=MIB, on_host=True
    )
    assert budget.other_bytes == 0


PLAN: dict[str, Any] = {
    "free_bytes": 10_000 * MIB,
    "utilization": 0.9,
    "weight_bytes": 3000 * MIB,
    "scratch_bytes": 1000 * MIB,
    "page_bytes": 2 * MIB,
    "most_pages": 100_000,
}


def test_pages_fill_the_share_that_weights_and_scratch_leave() -> None:
    plan = plan_memory(**PLAN)
    assert plan.num_pages == 2500
    assert plan.total_bytes == 9000 * MIB
    assert plan.lines() == [
        "memory: 10.5 GB free, 0.9 of it may be taken",
        "memory: weights 3.15 GB",
        "memory: scratch 1.05 GB",
        "memory: KV 5.24 GB, 2,500 pages = 40,000 tokens",
    ]


def test_no_more_pages_than_are_of_use() -> None:
    assert plan_memory(**PLAN | {"most_pages": 700}).num_pages == 700
    assert plan_memory(**PLAN | {"most_pages": 700, "least_pages": 900}).num_pages == 900


def test_pages_asked_for_by_number_may_take_all_that_is_free() -> None:
    assert plan_memory(**PLAN | {"asked_pages": 3000}).num_pages == 3000
    with pytest.raises(
        ConfigError, match=r"KV 6.29 GB; 10.5 GB may be taken \(all .* 0.00210? GB too few: lower --num-kv"
    ):
        plan_memory(**PLAN | {"asked_pages": 3001})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight_bytes": 8000 * MIB}, r"0.0168 GB too few: raise --memory-utilization"),
        ({"weight_bytes": 9500 * MIB}, r"weights take 9.96 GB, scratch 1.05 GB and KV .* take a smaller model"),
        ({"least_pages": 4000}, "take a smaller model"),
    ],
)
def test_what_does_not_fit_says_by_how_much_and_what_to_change(change: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=f"the model does not fit: .*{said}"):
        plan_memory(**PLAN | change)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_what_files_tell_of_a_model_is_what_it_takes(family: str, dtype: str, tmp_path: Path) -> None:
    options = FAMILIES.get(family) or {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    save_tiny(tmp_path, family, options)
    needs, decoder = model_needs(tmp_path, dtype, "cpu"), load_decoder(tmp_path, dtype, "cpu")
    assert needs.page_bytes == decoder.new_cache(1).nbytes
    # What a step reads leaves out the rows of the embedding; a generic model is float32 until it is packed.
    assert decoder.weight_bytes <= needs.weight_bytes <= 4 * decoder.weight_bytes


def test_both_engines_set_aside_the_scratch_that_is_accounted_for(tmp_path: Path) -> None:
    pair = EnginePair(*save_pair(tmp_path), max_num_batched_tokens=100)
    assert pair.draft is not None
    assert pair.target._scratch.num_slots == target_scratch_blocks(100) * BLOCK_SIZE
    assert pair.draft._scratch.num_slots == draft_scratch_blocks(256) * BLOCK_SIZE
