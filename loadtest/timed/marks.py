"""Events of a process, with their times: noted by its functions, written to a file when it ends.

A mark is a line: seconds of the machine's monotonic clock, which all processes share, and what happened.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Folder for the marks of a process, and the end of their files' names after its role.
FOLDER, SUFFIX = "BENCH_MARKS", ".marks"


class Marks:
    """The marks of this process.

    Args:
        role: Begins the name of their file.
    """

    def __init__(self, role: str) -> None:
        self._marks: list[tuple[float, str]] = []
        self._path = Path(os.environ[FOLDER]) / f"{role}{SUFFIX}"
        atexit.register(self._write)

    def note(self, what: str) -> None:
        """It happens now."""
        self._marks.append((time.monotonic(), what))

    def around(self, owner: type, name: str, before: str = "", after: str = "") -> None:
        """Notes calls of a method from now on."""
        inner: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            if before:
                self.note(before)
            result = inner(*args, **kwargs)
            if after:
                self.note(after)
            return result

        setattr(owner, name, run)

    def _write(self) -> None:
        self._path.write_text("".join(f"{at} {what}\n" for at, what in self._marks), encoding="utf-8")


def read_marks(folder: Path, role: str) -> list[tuple[float, str]]:
    """The marks of a process that has ended."""
    lines = (folder / f"{role}{SUFFIX}").read_text(encoding="utf-8").splitlines()
    return [(float(at), what) for at, what in map(str.split, lines)]
