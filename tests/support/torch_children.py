"""Counts the processes that tests start and that load torch: each takes seconds of a core before it does anything."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

# At most this many in `make test`.
MOST = 12
LOOK_S = 0.5
LIBRARY = "libtorch_cpu"


def _below(pid: int) -> Iterator[int]:
    """Yields the processes below one, however deep."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield int(child)
            yield from _below(int(child))


class TorchChildren(threading.Thread):
    """Looks every half a second for processes below this one that have loaded torch."""

    def __init__(self) -> None:
        super().__init__(name="torch-children", daemon=True)
        self._found: set[int] = set()
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        """Looks until the session ends."""
        while not self._ended.wait(LOOK_S):
            try:
                for pid in _below(os.getpid()):
                    if pid not in self._found and LIBRARY in Path(f"/proc/{pid}/maps").read_text():
                        self._found.add(pid)
            except OSError:
                # A process ended while it was looked at.
                continue

    def end(self) -> int:
        """Stops looking; returns the number of processes found."""
        self._ended.set()
        self.join()
        return len(self._found)
