"""How much of a host's memory is free for this process: the system's, or what its control group leaves of a limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
KIB = 1024
# Limit, use and the name of what can be dropped from it in memory.stat: of version 2, and of version 1.
CGROUP_FILES = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_host_bytes(root: Path = ROOT) -> int:
    """Returns what may be taken before the system or a limit of a container stops this process.

    Args:
        root: Where `proc` and `sys` are.
    """
    return min([_available(root), *_left_of_limits(root)])


def _available(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return KIB * found.get("MemAvailable", found["MemFree"])


def _left_of_limits(root: Path) -> Iterator[int]:
    """What each control group that holds this process leaves of its limit."""
    for base, limit_file, use_file, cache in CGROUP_FILES:
        for group in _groups(root, root / base):
            limit, use = _number(group / limit_file), _number(group / use_file)
            if limit is not None and use is not None:
                yield max(0, limit - use + _statistic(group / "memory.stat", cache))


def _groups(root: Path, base: Path) -> list[Path]:
    """The groups of this process below `base`, its own first; in a container the base is its own."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    paths = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    own = next((path for _, kinds, path in paths if kinds in ("", "memory")), "/").lstrip("/")
    folder = base / own
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))] if own else [base]


def _number(path: Path) -> int | None:
    """The number in a file; None: there is no such file, or no limit."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)
