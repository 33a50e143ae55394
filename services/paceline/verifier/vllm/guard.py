"""Kills vLLM's processes when the verifier that started them has ended, however it ended.

It runs as a separate process, `python -m paceline.verifier.vllm.guard PID...`, and waits for the end of its standard
input. Process numbers are reused, so it holds handles of the processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress


def start_guard(pids: Iterable[int]) -> subprocess.Popen[bytes]:
    """Starts a guard that kills these processes when this one ends; Linux only."""
    command = [sys.executable, "-m", "paceline.verifier.vllm.guard", *map(str, pids)]
    # In its own session, so that a signal to the group does not end it before the others.
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def main() -> None:
    """Waits for the end of the process that started this one."""
    held = []
    for pid in map(int, sys.argv[1:]):
        with suppress(ProcessLookupError):
            held.append(os.pidfd_open(pid))
    sys.stdin.buffer.read()
    for process in held:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
