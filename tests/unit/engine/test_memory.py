"""Memory: what is free, and what fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigError
from paceline.core.pages import BLOCK_SIZE, draft_scratch_blocks, target_scratch_blocks
from paceline.engine.loading import load_decoder
from paceline.engine.memory import (
    fitting_pages,
    free_host_bytes,
    model_needs,
)
from tests.support.checkpoints import save_pair
from tests.support.engines import EnginePair
from tests.unit.engine.tiny_models import FAMILIES, SIZES, save_tiny

MIB = 1024 * 1024
PLAN: dict[str, Any] = {
    "free_bytes": 10_000 * MIB,
    "utilization": 0.9,
    "weight_bytes": 3000 * MIB,
    "scratch_bytes": 1000 * MIB,
    "page_bytes": 2 * MIB,
    "most_pages": 100_000,
}


def test_pages_fill_the_share_that_weights_and_scratch_leave(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert fitting_pages(**PLAN) == 2500
    assert caplog.messages == [
        "memory: 10.5 GB free, 0.9 of it may be taken",
        "memory: weights 3.15 GB",
        "memory: scratch 1.05 GB",
        "memory: KV 5.24 GB, 2,500 pages = 40,000 tokens",
    ]


def test_no_more_pages_than_are_of_use() -> None:
    assert fitting_pages(**PLAN | {"most_pages": 700}) == 700
    assert fitting_pages(**PLAN | {"most_pages": 700, "least_pages": 900}) == 900


def test_pages_asked_for_by_number_may_take_all_that_is_free() -> None:
    assert fitting_pages(**PLAN | {"asked_pages": 3000}) == 3000
    with pytest.raises(
        ConfigError, match=r"KV 6.29 GB; 10.5 GB may be taken \(all .* 0.00210? GB too few: lower --num-kv"
    ):
        fitting_pages(**PLAN | {"asked_pages": 3001})


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
        fitting_pages(**PLAN | change)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_what_files_tell_of_a_model_is_what_it_takes(family: str, dtype: str, tmp_path: Path) -> None:
    options = FAMILIES.get(family) or {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
    save_tiny(tmp_path, family, options)
    needs, decoder = model_needs(tmp_path, dtype, "cpu"), load_decoder(tmp_path, dtype, "cpu")
    assert needs.page_bytes == decoder.new_cache(1).nbytes
    # What a step reads leaves out the rows of the embedding; a generic model is float32 until it is packed.
    assert decoder.weight_bytes <= needs.weight_bytes <= 4 * decoder.weight_bytes


def test_both_engines_set_aside_the_scratch_that_is_planned(tmp_path: Path) -> None:
    pair = EnginePair(*save_pair(tmp_path), max_num_batched_tokens=100)
    assert pair.draft is not None
    assert pair.target._scratch.num_slots == target_scratch_blocks(100) * BLOCK_SIZE
    assert pair.draft.scheduler.trees._scratch.num_slots == draft_scratch_blocks(256) * BLOCK_SIZE


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with 8,000 MiB free, whose process is in the group /pod/app of version 2."""
    write(tmp_path, "proc/meminfo", "MemTotal: 16384000 kB\nMemFree: 1024 kB\nMemAvailable: 8192000 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/pod/app\n")
    return tmp_path


def write(root: Path, name: str, text: object) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}")


def test_without_a_limit_it_is_what_the_system_has(host: Path) -> None:
    assert free_host_bytes(host) == 8000 * MIB
    write(host, "sys/fs/cgroup/pod/app/memory.max", "max\n")
    write(host, "sys/fs/cgroup/pod/app/memory.current", 5 * MIB)
    assert free_host_bytes(host) == 8000 * MIB


@pytest.mark.parametrize("group", ["pod/app", "pod", "."])
def test_a_limit_of_any_group_above_counts_without_what_can_be_dropped(host: Path, group: str) -> None:
    write(host, f"sys/fs/cgroup/{group}/memory.max", 1000 * MIB)
    write(host, f"sys/fs/cgroup/{group}/memory.current", 700 * MIB)
    write(host, f"sys/fs/cgroup/{group}/memory.stat", f"anon 1\ninactive_file {200 * MIB}\nactive_file 7\n")
    assert free_host_bytes(host) == 500 * MIB


def test_limits_of_version_1_count_too(host: Path) -> None:
    write(host, "proc/self/cgroup", "5:cpu:/elsewhere\n4:memory:/docker/abc\n")
    write(host, "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", 900 * MIB)
    write(host, "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes", 1000 * MIB)
    assert free_host_bytes(host) == 0


def test_here_and_now_something_is_free() -> None:
    assert free_host_bytes() > MIB
