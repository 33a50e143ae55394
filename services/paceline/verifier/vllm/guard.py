"""Ends vLLM's processes when the verifier that started them is gone, however it went: they would go on without it.

It is a process of its own, `python -m paceline.verifier.vllm.guard PID...`, and waits for the end of its standard
input. Numbers of processes come again, so it holds on to the processes themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress


def start_guard(pids: Iterable[int]) -> subprocess.Popen[bytes]:
    """Has these processes ended with this one; Linux only."""
    command = [sys.executable, "-m", "paceline.verifier.vllm.guard", *map(str, pids)]
    # A session of its own: what ends the others there must not end it before them.
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
