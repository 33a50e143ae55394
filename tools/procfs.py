"""Kernel facts of a process: memory, CPU time, children, environment, and where it lets it run."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES


def cpu_s(pid: int) -> float:
    """Returns the CPU time a process has taken, user and system."""
    # The name in parentheses may hold spaces.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def keep_to(pid: int, cpus: Collection[int]) -> None:
    """Keeps all threads that a process has now, and those they start, to some CPUs."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        # A thread may have ended since it was listed.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cpus)


def children_of(pid: int) -> list[int]:
    """Returns the processes that a process has started and that have not ended."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in os.listdir(tasks) for child in (tasks / task / "children").read_text().split()]


def environment_of(pid: int) -> dict[str, str]:
    """Returns the environment that a process was started with."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)
