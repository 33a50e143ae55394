"""Threads that yield their CPUs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, threading
from paceline.engine.process import then_yields_cpus

over, policies = threading.Event(), {}
idles = lambda: os.sched_getscheduler(0) == os.SCHED_IDLE

def wait(name, then=lambda: None):
    then()
    over.wait()
    policies[name] = idles()

def engine():
    with then_yields_cpus():
        pool = threading.Thread(target=wait, args=("pool",))
        pool.start()
        policies["while it loads"] = idles()
    made.set()
    wait("engine")
    pool.join()

made = threading.Event()
before = threading.Thread(target=wait, args=("before",))
before.start()
engine = threading.Thread(target=engine)
engine.start()
made.wait()
after = threading.Thread(target=wait, args=("after",))
after.start()
over.set()
for thread in (before, engine, after):
    thread.join()
policies["main"] = idles()
print(*sorted(name for name, idle in policies.items() if idle), sep=",")
print(*sorted(name for name, idle in policies.items() if not idle), sep=",")
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system knows no idle priority")
def test_the_engine_and_its_pool_yield_once_loaded_and_the_event_loop_keeps_its_priority():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["engine,pool", "after,before,main,while it loads"]
