"""Sets up a process that runs a model: cores, and how often threads hand over the interpreter."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

from paceline.core.errors import ConfigError
from paceline.core.step_time import StepMode
from paceline.service.config import parse_cpus

# The event loop and the engine thread share one interpreter; the default of 5 ms is half a step.
SWITCH_INTERVAL_S = 0.0005
PROC_STAT = Path("/proc/stat")
# A CPU is quiet that works for at most a tenth of this time.
QUIET_S, MOST_BUSY = 0.5, 0.1
# More than most caches hold.
READ_BYTES = 64 * 1024 * 1024

Sleep = Callable[[float], None]


def prepare_process(cpus: str, *, spare_cpus: str = "") -> None:
    """Keeps the process to the given CPUs (`0,2-3`; empty: all).

    Args:
        cpus: Its own.
        spare_cpus: Those it may use besides, when no other process wants them.

    Raises:
        ConfigError: A list is malformed or names CPUs this process may not use.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if not cpus:
        if spare_cpus:
            raise ConfigError("--spare-cpus needs --cpus beside it")
        return
    wanted = _cpus("--cpus", cpus) | _cpus("--spare-cpus", spare_cpus)
    allowed = os.sched_getaffinity(0)
    if not wanted <= allowed:
        raise ConfigError(f"--cpus {cpus} {spare_cpus}: this process may use CPUs {sorted(allowed)} only")
    os.sched_setaffinity(0, wanted)


def _cpus(name: str, text: str) -> frozenset[int]:
    return parse_cpus(name, text) if text else frozenset()


def yield_cpus() -> None:
    """From now on runs this process, with all its threads, only when no other process wants the CPU.

    Called once a service is loaded: on a busy machine one that yields from its start might never finish loading.
    """
    if not hasattr(os, "SCHED_IDLE"):
        return
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def until_quiet(
    cpus: Collection[int], *, most_s: float, read: Callable[[], str] = PROC_STAT.read_text, sleep: Sleep = time.sleep
) -> bool:
    """Waits until these CPUs do next to nothing; what is measured beside a process that is loading misleads.

    Args:
        cpus: Their numbers.
        most_s: Longest wait, in seconds.
        read: The kernel's counts, as /proc/stat has them.
        sleep: Waits for a number of seconds.

    Returns:
        Whether they became quiet in time.
    """
    busy = _busy_ticks(read(), cpus)
    for _ in range(round(most_s / QUIET_S)):
        sleep(QUIET_S)
        before, busy = busy, _busy_ticks(read(), cpus)
        if busy - before <= MOST_BUSY * QUIET_S * os.sysconf("SC_CLK_TCK"):
            return True
    return False


@contextmanager
def memory_read_on(cpus: Collection[int]) -> Iterator[None]:
    """Reads memory on these CPUs while a block runs, as drafters at work do.

    CPUs share memory, and some of them cores: a step beside idle ones is faster than a step beside drafters.
    """
    stop = threading.Event()
    weights = np.ones(READ_BYTES // 4 if cpus else 0, dtype=np.float32)

    def read(cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})
        while not stop.is_set():
            # Without the interpreter's lock.
            weights.sum()

    threads = [threading.Thread(target=read, args=(cpu,), daemon=True) for cpu in cpus]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _busy_ticks(stat: str, cpus: Collection[int]) -> int:
    """Ticks that these CPUs have worked for, all together."""
    names = {f"cpu{number}" for number in cpus}
    counts = [line.split() for line in stat.splitlines()]
    # user nice system idle iowait irq softirq ...
    return sum(sum(map(int, (*each[1:4], *each[6:8]))) for each in counts if each and each[0] in names)


class StepThreads:
    """Threads of a step: while drafters idle, their verifier uses their CPUs.

    Args:
        threads: Of a step while drafters work.
        cpus: Where these run; empty: anywhere.
        spare_cpus: The drafters' CPUs; a plain step has a thread more for each.
    """

    def __init__(self, threads: int, cpus: str, spare_cpus: str) -> None:
        spare, own = _cpus("--spare-cpus", spare_cpus), _cpus("--cpus", cpus)
        self._settings = {
            StepMode.DRAFTING: (threads, own),
            StepMode.PLAIN: (threads + len(spare), own | spare),
        }
        self._mode: StepMode | None = None

    def use(self, mode: StepMode) -> None:
        """Sets the calling thread up for steps of this mode; next to nothing when it is so already."""
        if mode is self._mode:
            return
        self._mode = mode
        threads, cpus = self._settings[mode]
        if cpus:
            os.sched_setaffinity(0, cpus)
        torch.set_num_threads(threads)
