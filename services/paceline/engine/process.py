"""Sets up a process that runs a model: cores, and priority."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from paceline.core.errors import ConfigError
from paceline.service.config import parse_cpus

logger = logging.getLogger(__name__)

# Linux shows up to 15 characters of it, such as in top -H.
ENGINE = "paceline-engine"


def prepare_process(cpus: str, *, spare_cpus: str = "") -> None:
    """Keeps the process to the given CPUs (`0,2-3`; empty: all).

    Args:
        spare_cpus: CPUs it may use besides, when no other process wants them.

    Raises:
        ConfigError: A list is malformed or names CPUs this process may not use.
    """
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


@contextmanager
def then_yields_cpus() -> Iterator[None]:
    """After this block the calling thread and its pool run only when no other process wants the CPU.

    The block loads a model: on a busy machine one that yields from its start might never finish loading. The event
    loop keeps its priority. An idle thread never preempts another one, so such a loop would wait for the tick: 3.9 ms
    from a draft to its message, where a normal one took 0.3 while the thread that computes yielded to it.
    """
    # Threads bear the name of the one that starts them, so this tells a pool from the threads of gRPC.
    tasks = Path("/proc/self/task")
    try:
        (tasks / str(threading.get_native_id()) / "comm").write_text(ENGINE)
        named = True
    except OSError as error:
        logger.warning("this system lets no thread have a lower priority", extra={"error": str(error)})
        named = False
    yield
    for task in tasks.iterdir() if named else ():
        with suppress(FileNotFoundError, ProcessLookupError):
            if (task / "comm").read_text().strip() == ENGINE:
                os.sched_setscheduler(int(task.name), os.SCHED_IDLE, os.sched_param(0))


class StepThreads:
    """Threads of a step: while drafters idle, their verifier uses their CPUs.

    Args:
        threads: Threads of a step while drafters work.
        cpus: Where these run; empty: anywhere.
        spare_cpus: The drafters' CPUs; while drafters idle a step has a thread more for each.
    """

    def __init__(self, threads: int, cpus: str, spare_cpus: str) -> None:
        spare, own = _cpus("--spare-cpus", spare_cpus), _cpus("--cpus", cpus)
        self._settings = {True: (threads, own), False: (threads + len(spare), own | spare)}
        self._drafters_work: bool | None = None

    def use(self, drafters_work: bool) -> None:
        """Sets the calling thread up for steps while drafters work or idle; next to nothing when it is so already."""
        if drafters_work is self._drafters_work:
            return
        self._drafters_work = drafters_work
        threads, cpus = self._settings[drafters_work]
        if cpus:
            os.sched_setaffinity(0, cpus)
        torch.set_num_threads(threads)
