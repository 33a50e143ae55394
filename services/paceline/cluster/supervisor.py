"""Keeps processes running: starts them, waits until they are well, restarts those that die, stops them all.

It knows commands and health checks and nothing of what the processes do. All of it belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline
from paceline.core.errors import ConfigError, UnavailableError
from paceline.service.config import EXIT_STATUS_CONFIG
from paceline.service.supervision import BackOff

HealthCheck = Callable[[], Awaitable[bool]]

POLL_S = 0.1
# After so long, and twice as long each time, the last message in the log of a process that starts is shown.
PROGRESS_S = 3.0
NUM_LOG_LINES_SHOWN = 5
# How `exit_with_error` writes it.
_REFUSAL = re.compile(r"^[^=|]*\bpaceline\b[^=|]*?: error: (.+)")
# The message of a log line; its settings would hide it.
_MESSAGE = re.compile(r'\bmsg=("(?:[^"\\]|\\.)*"|\S+)')
# Grace of a process after the common deadline has passed, before it is killed.
LEAST_GRACE_S = 1.0
# The settings that a child inherits; see `child_environment`.
KEPT = "PACELINE_LEARNED_DIR", "PACELINE_REHEARSE"
# A thread that spins for long takes the core of the other tier; one that sleeps between two layers takes as long to
# wake on a virtual machine as a layer does. So OpenMP's threads sleep, but after a gap longer than a step has any.
THREAD_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """A process to keep running.

    Attributes:
        name: Unique in its supervisor.
        argv: Program and arguments.
        env: The whole environment.
        log_path: File that gets stdout and stderr; None: they are inherited.
        is_healthy: Says whether the process does its work.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    is_healthy: HealthCheck
    log_path: Path | None = None


class Child:
    """A supervised process with its restarts."""

    def __init__(self, spec: ChildSpec, say: Callable[[str], None], back_off: BackOff) -> None:
        self.spec = spec
        self.num_restarts = 0
        self._say = say
        self._back_off = back_off
        self._restarted = asyncio.Condition()
        self._spawn()
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process and its children; SIGTERM to it alone, which ends them when they are done."""
        if self._process.poll() is None:
            send = os.kill if number is signal.SIGTERM else os.killpg
            with suppress(ProcessLookupError):
                send(self._process.pid, number)

    async def until_healthy(self, timeout_s: float) -> None:
        """Returns when the process does its work.

        Raises:
            ConfigError: The process ended.
            UnavailableError: It did not get that far in time.
        """
        ended, started_s, pause_s = self._ended, time.monotonic(), PROGRESS_S
        try:
            async with asyncio.timeout(timeout_s):
                while not await self.spec.is_healthy() or ended.done():
                    if ended.done():
                        raise ConfigError(self._exit_message(ended.result()))
                    await asyncio.wait([ended], timeout=POLL_S)
                    if time.monotonic() - started_s > pause_s:
                        self._say(f"{self.spec.name} still starts after {pause_s:.0f} s{self._last_message()}")
                        pause_s *= 2
        except TimeoutError:
            message = f"{self.spec.name} was not ready within {timeout_s:g} s{self._log_tail()}"
            raise UnavailableError(message) from None

    def keep(self) -> None:
        """From now on restarts the process whenever it ends."""
        self._keeper = asyncio.create_task(self._keep(), name=f"keep {self.spec.name}")

    async def until_restarted(self, count: int) -> None:
        async with self._restarted:
            await self._restarted.wait_for(lambda: self.num_restarts >= count)

    async def stop(self, grace_s: float) -> None:
        """Asks the process to end, gives it `grace_s` seconds, then kills it."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)
        done, _ = await asyncio.wait([self._ended], timeout=grace_s)
        if not done:
            self._say(f"{self.spec.name} did not stop within {grace_s:.0f} s and is killed")
            self.send_signal(signal.SIGKILL)
            await self._ended

    def kill(self) -> None:
        """Kills the process at once and does not wait; the last resort of a supervisor that is cancelled."""
        if self._keeper is not None:
            self._keeper.cancel()
        self.send_signal(signal.SIGKILL)

    async def _keep(self) -> None:
        delay_s: float | None = None
        while True:
            started_s = time.monotonic()
            ended = _describe(await asyncio.shield(self._ended))
            delay_s = self._back_off.delay_s(delay_s, time.monotonic() - started_s)
            self._say(f"{self.spec.name} {ended}; restart {self.num_restarts + 1} in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            try:
                self._spawn()
            except OSError as error:
                self._say(f"{self.spec.name} cannot be started again ({error.strerror}); trying on")
                continue
            async with self._restarted:
                self.num_restarts += 1
                self._restarted.notify_all()

    def _spawn(self) -> None:
        command = [sys.executable, "-m", "paceline.cluster", str(os.getpid()), *self.spec.argv]
        path = self.spec.log_path
        log = None if path is None else path.open("ab")
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(self.spec.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                # Ctrl-C reaches the supervisor only, which then stops its children in order.
                start_new_session=True,
            )
        finally:
            if log is not None:
                log.close()
        self._ended = _exit_status(self._process)

    def _exit_message(self, status: int) -> str:
        lines = self._last_lines()
        # A service that cannot start for a reason that it knows says so in one line, its last.
        if status == EXIT_STATUS_CONFIG and lines and (said := _REFUSAL.search(lines[-1])):
            return f"{self.spec.name} cannot start: {said[1]} (log: {self.spec.log_path})"
        return f"{self.spec.name} {_describe(status)} before it was ready{self._log_tail()}"

    def _last_message(self) -> str:
        said = [found[1].strip('"') for line in self._last_lines() if (found := _MESSAGE.search(line))]
        return f": {said[-1]} (log: {self.spec.log_path})" if said else ""

    def _log_tail(self) -> str:
        lines = self._last_lines()
        return f": {' | '.join(lines)} (log: {self.spec.log_path})" if lines else ""

    def _last_lines(self) -> list[str]:
        path = self.spec.log_path
        # A device, for instance, may have no end.
        if path is None or not path.is_file():
            return []
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES_SHOWN:]


class ProcessSupervisor:
    """Processes that start and stop together; `say` gets one line for each restart and each kill."""

    def __init__(self, say: Callable[[str], None], back_off: BackOff | None = None) -> None:
        self._say = say
        self._back_off = BackOff() if back_off is None else back_off
        self._stages: list[list[Child]] = []

    @property
    def children(self) -> list[Child]:
        return [child for stage in self._stages for child in stage]

    def child(self, name: str) -> Child:
        """Returns a process by its name.

        Raises:
            KeyError: There is none of that name.
        """
        for child in self.children:
            if child.spec.name == name:
                return child
        raise KeyError(name)

    async def start(self, specs: Sequence[ChildSpec], timeout_s: float) -> None:
        """Starts processes side by side and returns when all are well.

        Raises:
            ConfigError: A service ended before; the others keep running until `stop`.
            UnavailableError: A service was not well within `timeout_s` seconds.
        """
        stage: list[Child] = []
        self._stages.append(stage)
        for spec in specs:
            stage.append(Child(spec, self._say, self._back_off))
        await until_all(child.until_healthy(timeout_s) for child in stage)
        for child in stage:
            child.keep()

    async def stop(self, grace_s: float) -> None:
        """Stops all, those started last first; `grace_s` seconds for all together, then they are killed."""
        deadline_s = time.monotonic() + grace_s
        try:
            while self._stages:
                left_s = max(LEAST_GRACE_S, deadline_s - time.monotonic())
                await asyncio.gather(*(child.stop(left_s) for child in self._stages[-1]))
                self._stages.pop()
        finally:
            for child in self.children:
                child.kill()


def child_environment(environ: Mapping[str, str], *, num_threads: int | None = None) -> dict[str, str]:
    """Returns the environment of a child: ours without our settings, able to import this very package.

    Settings travel as flags; a `PACELINE_PORT` meant for one process must not reach the others. Where a host keeps what
    is learned, and when it rehearses, holds for all that run on it.
    """
    kept = {name: value for name, value in environ.items() if not name.startswith("PACELINE_") or name in KEPT}
    source_root = str(Path(paceline.__file__).parents[1])
    path = [source_root, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    kept["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    kept |= THREAD_SETTINGS
    if num_threads is not None:
        kept["OMP_NUM_THREADS"] = str(num_threads)
    return kept


async def until_all(waits: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Waits for all; the first error ends the waiting."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _exit_status(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Returns a future of the exit status, fed by a thread, so that it works under every event loop."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def deliver(status: int) -> None:
        if not ended.done():
            ended.set_result(status)

    def wait() -> None:
        status = process.wait()
        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(deliver, status)

    threading.Thread(target=wait, name=f"wait {process.pid}", daemon=True).start()
    return ended


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    with suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"
