"""Runs the helper process of a proposer: starts it, talks to it, restarts it, and ends it with this process.

Steps of vLLM look after it, and wait neither for its start nor for its end. vLLM's worker may be a daemon of
`multiprocessing`, which may start no process of that kind; so only its connections are used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from paceline.core.errors import ConfigError
from paceline.service.config import parse_cpus
from paceline.service.supervision import QUICK
from paceline.vllm.board import SharedTrees, make_board
from paceline.vllm.settings import HelperJob
from paceline.vllm.step_message import NO_STEP, ChainsMessage, StepMessage

# Until a helper is ready; the first one on a machine compiles its loops.
START_S = 300.0
MOST_MISSES = 8
# Time for a helper to end by itself.
END_S = 1.0
# The socket holds many steps, so a helper that takes or completes no message for so long has stopped.
STANDSTILL_S = 1
MOST_UNREAD_MESSAGES = 64
ANSWER_BYTES = 1 << 20

# Where vLLM's CPU backend is given the CPUs of each rank, such as 0-3|4-7; or auto, or nobind.
BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
THREADS = Path("/proc/self/task")

Stream: TypeAlias = "Connection[HelperJob | StepMessage, object]"

_log = logging.getLogger(__name__)


class HelperProcess:
    """The client's end, used only by the thread of vLLM's steps.

    Args:
        module: The helper's program; it gets the numbers of its socket and of its board.
        job: The first message to it: other users can read command lines, and the registry's URL may hold a password.
        cpus: Returns the CPUs for it, at each start; none: all.
    """

    def __init__(self, module: str, job: HelperJob, cpus: Callable[[], Collection[int]]) -> None:
        self._module, self._job, self._cpus = module, job, cpus
        self._life: _Life | None = None
        self._misses = 0
        self._awaits = False
        self._is_closed = False
        # Killed helpers, until they have ended.
        self._killed: list[subprocess.Popen[bytes]] = []
        # When the next one may start, and the pause before that.
        self._start_s = 0.0
        self._pause_s: float | None = None

    @property
    def awaits(self) -> bool:
        """Whether to wait for guesses after the next steps, as the helper last sent; not at the start."""
        return self._awaits

    @property
    def connected(self) -> bool:
        """Whether a helper seems to work."""
        return self._ready is not None

    @property
    def board(self) -> SharedTrees | None:
        """The helper's shared trees; None while none is ready."""
        return self._ready.board if self._ready else None

    def start(self) -> None:
        """Starts a helper where there is none, some time after the end of the last one."""
        self._killed = [process for process in self._killed if process.poll() is None]
        if self._life is None and not self._is_closed and time.monotonic() >= self._start_s:
            try:
                self._life = self._started()
            except OSError as error:
                self._pause(f"could not start: {error}", 0.0)

    def renewed(self) -> bool:
        """Whether a helper has got ready since the last call; it knows no session."""
        life = self._life
        if life is None or life.is_ready:
            return False
        with self._abandoned_if_lost():
            if life.stream.poll():
                life.stream.recv_bytes(ANSWER_BYTES)
                life.is_ready, self._misses = True, 0
            elif time.monotonic() > life.started_s + START_S:
                raise ConnectionError(f"it was not ready within {START_S:g} s")
        return life.is_ready

    def listen(self) -> None:
        """Handles what the helper has said since the last step, such as that nobody need wait any more."""
        with self._abandoned_if_lost():
            if self._ready:
                self._answer(self._ready.stream, NO_STEP, 0.0)

    def exchange(self, message: StepMessage, deadline_s: float) -> ChainsMessage | None:
        """Sends a step, and waits for its answer if the step is awaited.

        Args:
            deadline_s: Monotonic seconds at which the wait ends.

        Returns:
            The answer; None if it is not awaited, did not come in time, or the helper is lost.
        """
        with self._abandoned_if_lost():
            if life := self._ready:
                life.stream.send(message)
                return self._awaited(life.stream, message.step, deadline_s) if message.awaited else None
        return None

    def abandon(self, reason: str) -> None:
        """Kills the helper; another one starts after a pause."""
        life, self._life, self._awaits = self._life, None, False
        if life is not None:
            life.close()
            life.process.kill()
            self._killed.append(life.process)
            self._pause(f"was given up: {reason}", time.monotonic() - life.started_s)

    def close(self) -> None:
        """Ends the helper for good, by force if it does not end by itself within 1 s."""
        self._is_closed = True
        life, self._life = self._life, None
        if life is not None:
            life.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                life.process.wait(END_S)
            life.process.kill()
            self._killed.append(life.process)
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)

    @property
    def _ready(self) -> _Life | None:
        return self._life if self._life is not None and self._life.is_ready else None

    @contextlib.contextmanager
    def _abandoned_if_lost(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            self.abandon(f"it read or completed no message for {STANDSTILL_S} s")
        except (EOFError, OSError) as error:
            self.abandon(str(error) or "it closed its end")

    def _awaited(self, stream: Stream, step: int, deadline_s: float) -> ChainsMessage | None:
        answer = self._answer(stream, step, deadline_s)
        self._misses = 0 if answer is not None else self._misses + 1
        if self._misses >= MOST_MISSES:
            raise ConnectionError(f"it answered none of {self._misses} steps in time")
        return answer

    def _answer(self, stream: Stream, step: int, deadline_s: float) -> ChainsMessage | None:
        """Reads what has come, and waits for the answer to a step until a deadline."""
        for _ in range(MOST_UNREAD_MESSAGES):
            if not stream.poll(max(0.0, deadline_s - time.monotonic())):
                return None
            answer: ChainsMessage = pickle.loads(stream.recv_bytes(ANSWER_BYTES))
            self._awaits = answer.awaits
            if answer.step == step:
                return answer
        raise ConnectionError(f"it sent more than {MOST_UNREAD_MESSAGES} messages at once")

    def _pause(self, outcome: str, alive_s: float) -> None:
        self._pause_s = pause_s = QUICK.delay_s(self._pause_s, alive_s)
        self._start_s = time.monotonic() + pause_s
        # If it never starts, this is logged a few times only.
        if pause_s < QUICK.most_s:
            _log.warning("the helper process %s; another one starts in %.1f s", outcome, pause_s)

    def _started(self) -> _Life:
        file = make_board()
        try:
            board, (ours, theirs) = SharedTrees(file), _stream_pair()
            with theirs:
                process = self._process(theirs.fileno(), file)
            ours.send(self._job)
        finally:
            os.close(file)
        try:
            if cpus := self._cpus():
                os.sched_setaffinity(process.pid, cpus)
        except OSError as error:
            _log.warning("the CPUs of the helper process cannot be chosen, it runs on all: %s", error)
        return _Life(process, ours, board, time.monotonic())

    def _process(self, stream: int, board: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", self._module, "--fd", str(stream), "--board", str(board)],
            stdin=subprocess.DEVNULL,
            pass_fds=(stream, board),
            process_group=0,
        )


@dataclass(slots=True)
class _Life:
    """A helper process, our end of its socket, its board, and when it was started."""

    process: subprocess.Popen[bytes]
    stream: Stream
    board: SharedTrees
    started_s: float
    is_ready: bool = False

    def close(self) -> None:
        """Closes the connection, which ends the helper."""
        self.stream.close()
        self.board.close()


def _stream_pair() -> tuple[Stream, socket.socket]:
    """Returns our end, whose calls a helper that has stopped blocks for a moment only, and the helper's."""
    ours, theirs = socket.socketpair()
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STANDSTILL_S, 0))
    return Connection(ours.detach()), theirs


def free_cpus(environ: Mapping[str, str]) -> frozenset[int]:
    """Returns the host's CPUs that no thread here is bound to; none if no thread is bound, or all CPUs are taken."""
    host = frozenset(range(os.cpu_count() or 1))
    used = _bound_by_variable(environ) | _bound_threads(host)
    return host - used if used else frozenset()


def _bound_by_variable(environ: Mapping[str, str]) -> frozenset[int]:
    cpus: frozenset[int] = frozenset()
    # auto, nobind, or something that vLLM itself refuses.
    with contextlib.suppress(ConfigError):
        for rank in environ.get(BIND_VARIABLE, "").split("|"):
            cpus |= parse_cpus(BIND_VARIABLE, rank)
    return cpus


def _bound_threads(host: frozenset[int]) -> frozenset[int]:
    """Returns the CPUs of threads that may not run on all."""
    used: set[int] = set()
    for thread in THREADS.iterdir() if THREADS.is_dir() else ():
        # The thread may have ended by now.
        with contextlib.suppress(OSError):
            cpus = os.sched_getaffinity(int(thread.name))
            used |= cpus if cpus < host else set()
    return frozenset(used)
