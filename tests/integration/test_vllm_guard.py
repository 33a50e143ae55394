"""Processes that a verifier started for vLLM end with it, however it ends."""

from __future__ import annotations

import signal
import subprocess
import sys

START = """
import os, subprocess, sys, threading
from paceline.verifier.vllm.guard import start_guard

child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
# What has ended is nobody's business.
gone = subprocess.Popen(["true"])
gone.wait()
start_guard([gone.pid, child.pid])
print(child.pid, flush=True)
threading.Event().wait()
"""


def test_processes_end_when_the_one_that_started_them_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert int(starter.stdout.readline())
        starter.send_signal(signal.SIGKILL)
        # The child holds the pipe's other end until it ends, too.
        assert starter.stdout.read() == b""
