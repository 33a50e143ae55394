"""Free memory is the smaller of what the system has and what limits of control groups leave."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engine.free_memory import free_host_bytes

MIB = 1024 * 1024


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
