"""The account of memory: what is named adds up to what the process holds."""

from __future__ import annotations

from pathlib import Path

from paceline.core.pages import BLOCK_SIZE
from paceline.engine.budget import MIB, account, draft_scratch_blocks, target_scratch_blocks
from tests.support.checkpoints import save_pair
from tests.support.engines import EnginePair


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


def test_both_engines_set_aside_the_scratch_that_is_accounted_for(tmp_path: Path) -> None:
    pair = EnginePair(*save_pair(tmp_path), max_num_batched_tokens=100)
    assert pair.draft is not None
    assert pair.target._scratch.num_slots == target_scratch_blocks(100) * BLOCK_SIZE
    assert pair.draft._scratch.num_slots == draft_scratch_blocks(256) * BLOCK_SIZE
