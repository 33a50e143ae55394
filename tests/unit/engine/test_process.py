"""Processes that yield their CPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, threading
from contextlib import suppress
from paceline.engine.process import yield_cpus

def policies():
    found = set()
    for thread in os.listdir("/proc/self/task"):
        # One that has been joined may still be listed while it goes.
        with suppress(ProcessLookupError):
            found.add(os.sched_getscheduler(int(thread)))
    return found

over, seen = threading.Event(), []
early = threading.Thread(target=over.wait, daemon=True)
early.start()
before = policies()
yield_cpus()
late = threading.Thread(target=lambda: seen.append(os.sched_getscheduler(0)))
late.start()
late.join()
print(os.SCHED_IDLE in before, policies() == {os.SCHED_IDLE}, seen == [os.SCHED_IDLE])
over.set()
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system knows no idle priority")
def test_all_threads_yield_those_that_run_and_those_to_come():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "True", "True"]
