"""Sets up a process that runs a model: cores, and how often threads hand over the interpreter."""

from __future__ import annotations

import os
import sys

from paceline.core.errors import ConfigError

# The event loop and the engine thread share one interpreter; the default of 5 ms is half a step.
SWITCH_INTERVAL_S = 0.0005


def prepare_process(cpus: str) -> None:
    """Keeps the process to the given CPUs (`0,2-3`; empty: all).

    Raises:
        ConfigError: The list is malformed or names CPUs this process may not use.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if not cpus:
        return
    wanted = _parse_cpus(cpus)
    allowed = os.sched_getaffinity(0)
    if not wanted <= allowed:
        raise ConfigError(f"--cpus {cpus}: this process may use CPUs {sorted(allowed)} only")
    os.sched_setaffinity(0, wanted)


def _parse_cpus(text: str) -> set[int]:
    cpus: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    except ValueError as error:
        raise ConfigError(f"--cpus must look like 0,2-3, got {text!r}") from error
    if not cpus:
        raise ConfigError(f"--cpus names no CPU: {text!r}")
    return cpus
