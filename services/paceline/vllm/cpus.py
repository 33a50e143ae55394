"""Which CPUs the helper process runs on: vLLM's threads must not share theirs with it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from paceline.core.errors import ConfigError

# Where vLLM's CPU backend is told the CPUs of each rank, such as 0-3|4-7; or auto, or nobind.
BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
THREADS = Path("/proc/self/task")


def parse_cpus(name: str, text: str) -> frozenset[int]:
    """The CPUs of a list such as `0-3,7`.

    Raises:
        ConfigError: It is none; names the setting.
    """
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"{name} must be a list of CPUs such as 4-5 or 0,2-3, got {text!r}")
        cpus.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(cpus)


def free_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """The CPUs of the host that this process's threads are not bound to; none where nothing is bound, or everything."""
    host = frozenset(range(os.cpu_count() or 1))
    used = _bound_by_variable(environ) | _bound_threads(host)
    return host - used if used else frozenset()


def _bound_by_variable(environ: Mapping[str, str]) -> frozenset[int]:
    cpus: frozenset[int] = frozenset()
    # auto, nobind, and what vLLM itself will complain of.
    with contextlib.suppress(ConfigError):
        for rank in environ.get(BIND_VARIABLE, "").split("|"):
            cpus |= parse_cpus(BIND_VARIABLE, rank)
    return cpus


def _bound_threads(host: frozenset[int]) -> frozenset[int]:
    """CPUs of the threads that do not run everywhere."""
    used: set[int] = set()
    for thread in THREADS.iterdir() if THREADS.is_dir() else ():
        # It may be gone by now.
        with contextlib.suppress(OSError):
            cpus = os.sched_getaffinity(int(thread.name))
            used |= cpus if cpus < host else set()
    return frozenset(used)
