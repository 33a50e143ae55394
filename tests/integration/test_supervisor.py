"""The supervisor with real processes: tiny Python programs, no model."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cluster.supervisor import Child, ChildSpec, ProcessSupervisor
from paceline.core.errors import ConfigError, UnavailableError
from paceline.service.supervision import BackOff

SLEEPER = "import sys, time; open(sys.argv[1], 'a').close(); time.sleep(600)"
POLITE = """
import pathlib, signal, sys, time
def stop(*_):
    path = pathlib.Path(sys.argv[1])
    path.with_suffix(".stopped").touch()
    with open(path.with_name("order"), "a") as order: order.write(path.name + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open(sys.argv[1], 'a').close()
time.sleep(600)
"""
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPER
QUICK = BackOff(first_s=0.01, most_s=0.05)
ENV = os.environ | {"PYTHONPATH": "services"}


def spec(folder: Path, name: str, program: str) -> ChildSpec:
    flag = folder / name

    async def is_healthy() -> bool:
        return flag.exists()

    return ChildSpec(
        name=name,
        argv=(sys.executable, "-c", program, str(flag)),
        env=ENV,
        is_healthy=is_healthy,
        log_path=folder / f"{name}.log",
    )


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
async def supervisor(said: list[str]) -> AsyncIterator[ProcessSupervisor]:
    running = ProcessSupervisor(said.append, QUICK)
    yield running
    await running.stop(grace_s=0)


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                return
            if state == "Z":
                return
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await condition():  # noqa: ASYNC110 - a file gives no event
            await asyncio.sleep(0.01)


async def test_start_returns_when_all_are_well(supervisor: ProcessSupervisor, tmp_path: Path) -> None:
    await supervisor.start([spec(tmp_path, "a", SLEEPER), spec(tmp_path, "b", SLEEPER)], timeout_s=30)
    assert (tmp_path / "a").exists()
    assert (tmp_path / "b").exists()
    assert [child.spec.name for child in supervisor.children] == ["a", "b"]


async def test_a_child_that_dies_is_restarted_and_said_so(
    supervisor: ProcessSupervisor, said: list[str], tmp_path: Path
) -> None:
    await supervisor.start([spec(tmp_path, "a", SLEEPER)], timeout_s=30)
    child = supervisor.child("a")
    first_pid = child.pid
    (tmp_path / "a").unlink()
    child.send_signal(signal.SIGKILL)
    async with asyncio.timeout(30):
        await child.until_restarted(1)
    await child.until_healthy(timeout_s=30)
    assert child.pid != first_pid
    assert child.num_restarts == 1
    assert said == ["a was ended by SIGKILL; restart 1 in 0.01 s"]


async def test_a_child_that_keeps_dying_is_restarted_at_growing_intervals(
    supervisor: ProcessSupervisor, said: list[str], tmp_path: Path
) -> None:
    die_after_the_first_time = (
        "import os, sys, time\n"
        "if os.path.exists(sys.argv[1]): sys.exit(3)\n"
        "open(sys.argv[1], 'a').close(); time.sleep(600)"
    )
    await supervisor.start([spec(tmp_path, "a", die_after_the_first_time)], timeout_s=30)
    child = supervisor.child("a")
    child.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        await child.until_restarted(4)
    assert said[:4] == [
        "a was ended by SIGTERM; restart 1 in 0.01 s",
        "a ended with exit status 3; restart 2 in 0.02 s",
        "a ended with exit status 3; restart 3 in 0.04 s",
        "a ended with exit status 3; restart 4 in 0.05 s",
    ]


def test_the_back_off_doubles_to_its_bound_and_is_forgotten_after_a_long_life() -> None:
    back_off = BackOff(first_s=0.5, most_s=30.0, reset_after_s=60.0)
    delays = []
    delay_s: float | None = None
    for _ in range(8):
        delay_s = back_off.delay_s(delay_s, alive_s=1.0)
        delays.append(delay_s)
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert back_off.delay_s(30.0, alive_s=60.0) == 0.5


async def test_a_child_that_cannot_start_is_reported_with_its_last_words(
    supervisor: ProcessSupervisor, said: list[str], tmp_path: Path
) -> None:
    program = "import sys; sys.exit('no such checkpoint')"
    with pytest.raises(ConfigError, match=r"b ended with exit status 1 before it was ready: no such checkpoint"):
        await supervisor.start([spec(tmp_path, "a", SLEEPER), spec(tmp_path, "b", program)], timeout_s=30)
    assert said == []


async def test_of_a_service_that_refuses_to_start_only_its_own_line_is_shown(
    supervisor: ProcessSupervisor, tmp_path: Path
) -> None:
    program = (
        "import sys\nprint('ts=1 level=info msg=starting model=x port=1')\n"
        "print('paceline verifier: error: --model x: no such folder'); sys.exit(2)"
    )
    with pytest.raises(ConfigError, match=r"^b cannot start: --model x: no such folder \(log: \S+\)$"):
        await supervisor.start([spec(tmp_path, "b", program)], timeout_s=30)


async def test_of_a_process_that_takes_long_it_is_said_what_it_does(
    supervisor: ProcessSupervisor, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cluster.supervisor.PROGRESS_S", 0.05)

    async def told() -> bool:
        return any("compiles kernels" in line for line in said)

    program = "import time\nprint('ts=1 level=info msg=\"compiles kernels, once\" x=1', flush=True)\ntime.sleep(60)"
    slow = replace(spec(tmp_path, "b", program), is_healthy=told)
    await supervisor.start([slow], timeout_s=30)
    assert re.fullmatch(r"b still starts after \d+ s: compiles kernels, once \(log: \S+\)", said[-1])


async def test_a_program_that_is_not_there_is_named(supervisor: ProcessSupervisor, tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    missing = ChildSpec(name="m", argv=("no-such-program",), env=ENV, is_healthy=never, log_path=tmp_path / "log")
    with pytest.raises(ConfigError, match=r"m ended with exit status 127 .*cannot run no-such-program"):
        await supervisor.start([missing], timeout_s=30)


async def test_a_child_that_is_never_well_is_given_up(supervisor: ProcessSupervisor, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"a was not ready within 0\.2 s"):
        await supervisor.start([spec(tmp_path, "a", "import time; time.sleep(600)")], timeout_s=0.2)


async def test_stop_ends_the_last_started_first_and_lets_them_finish(
    supervisor: ProcessSupervisor, tmp_path: Path
) -> None:
    await supervisor.start([spec(tmp_path, "first", POLITE)], timeout_s=30)
    await supervisor.start([spec(tmp_path, "second", POLITE)], timeout_s=30)
    pids = [child.pid for child in supervisor.children]
    await supervisor.stop(grace_s=30)
    assert (tmp_path / "order").read_text().splitlines() == ["second", "first"]
    for pid in pids:
        await gone(pid)


async def test_a_stopped_process_is_continued_so_that_it_can_end(supervisor: ProcessSupervisor, tmp_path: Path) -> None:
    await supervisor.start([spec(tmp_path, "a", POLITE)], timeout_s=30)
    supervisor.child("a").send_signal(signal.SIGSTOP)
    await supervisor.stop(grace_s=30)
    assert (tmp_path / "a.stopped").exists()


async def test_a_child_that_will_not_end_is_killed_and_said_so(
    supervisor: ProcessSupervisor, said: list[str], tmp_path: Path
) -> None:
    await supervisor.start([spec(tmp_path, "a", STUBBORN)], timeout_s=30)
    pid = supervisor.child("a").pid
    await supervisor.stop(grace_s=0.1)
    await gone(pid)
    assert said == ["a did not stop within 1 s and is killed"]


async def test_a_child_waiting_for_its_restart_is_not_started_again_by_stop(tmp_path: Path) -> None:
    said: list[str] = []
    died = asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        died.set()

    slow = ProcessSupervisor(say, BackOff(first_s=600.0, most_s=600.0))
    await slow.start([spec(tmp_path, "a", SLEEPER)], timeout_s=30)
    child: Child = slow.child("a")
    child.send_signal(signal.SIGKILL)
    async with asyncio.timeout(30):
        await died.wait()
    await slow.stop(grace_s=30)
    assert child.num_restarts == 0


async def test_children_do_not_outlive_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pathlib import Path
from paceline.cluster.supervisor import ChildSpec, ProcessSupervisor
async def main():
    flag = Path({str(tmp_path / "a")!r})
    async def is_healthy(): return flag.exists()
    supervisor = ProcessSupervisor(print)
    argv = (sys.executable, "-c", {SLEEPER!r}, str(flag))
    env = {{"PYTHONPATH": "services"}}
    await supervisor.start([ChildSpec(name="a", argv=argv, env=env, is_healthy=is_healthy)], 30)
    Path({str(tmp_path / "pid")!r}).write_text(str(supervisor.child("a").pid))
    Path({str(tmp_path / "up")!r}).touch()
    await asyncio.sleep(600)
asyncio.run(main())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", program, env=ENV)

    async def up() -> bool:
        return (tmp_path / "up").exists()

    await until(up)
    supervisor.kill()
    await supervisor.wait()
    await gone(int((tmp_path / "pid").read_text()))


def test_the_wrapper_does_not_start_anything_for_a_dead_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.cluster", "1", "touch", str(tmp_path / "x")]
    ended = subprocess.run(command, env=ENV, check=False, timeout=60)
    assert ended.returncode == 1
    assert not (tmp_path / "x").exists()
