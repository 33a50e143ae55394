"""Processes that yield their CPUs, wait for quiet ones, and keep some busy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from paceline.engine.process import PROC_STAT, QUIET_S, _busy_ticks, memory_read_on, until_quiet

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


def waited_for(*busy: int, most_s: float = 5.0) -> tuple[bool, float]:
    """Whether CPU 1 became quiet, and after how many seconds, when it has worked for so many ticks at each look."""
    looks = iter(busy)
    slept: list[float] = []

    def read() -> str:
        ticks = next(looks)
        return f"cpu {900 * ticks} 0 0 0 0 0 0\ncpu0 {500 * ticks} 0 0 0 0 0 0\ncpu1 {ticks} 0 0 7 7 0 0\nintr 5\n"

    return until_quiet({1}, most_s=most_s, read=read, sleep=slept.append), sum(slept)


def test_a_cpu_is_waited_for_until_it_does_next_to_nothing():
    assert waited_for(100, 150, 200, 205) == (True, pytest.approx(3 * QUIET_S))
    assert waited_for(100, 100) == (True, pytest.approx(QUIET_S))


def test_a_cpu_that_does_not_become_quiet_is_waited_for_so_long():
    assert waited_for(*range(0, 1000, 9), most_s=2.0) == (False, pytest.approx(2.0))


def test_this_machines_counts_can_be_read():
    assert until_quiet({0}, most_s=QUIET_S) in (True, False)
    before = _busy_ticks(PROC_STAT.read_text(), os.sched_getaffinity(0))
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert _busy_ticks(PROC_STAT.read_text(), os.sched_getaffinity(0)) > before


def test_memory_is_read_on_the_cpus_that_are_named_until_the_block_ends():
    before, allowed = threading.active_count(), os.sched_getaffinity(0)
    with memory_read_on([min(allowed)]):
        used_s = time.thread_time(), time.process_time()
        while time.process_time() - used_s[1] - (time.thread_time() - used_s[0]) < 0.05:
            time.sleep(0.01)
    assert threading.active_count() == before
    assert os.sched_getaffinity(0) == allowed
    with memory_read_on([]):
        assert threading.active_count() == before
