"""The helper process of a proposer: started, fed, listened to, started again when it ends, and ended with us.

Its start and its end are a thread's of their own: a step of vLLM never waits for them.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from paceline.vllm.helper_socket import HelperLostError, HelperSocket
from paceline.vllm.step_message import BrokenMessageError, ChainsMessage, StepMessage, step_bytes

FIRST_PAUSE_S = 0.1
LAST_PAUSE_S = 5.0
# A helper that has run for so long is well: the next one starts after the first pause again.
SETTLED_S = 10.0
MOST_MISSES = 8
# So long it may take to end by itself.
END_S = 1.0
UNREAD_BYTES = 1 << 24
ANSWER_BYTES = 1 << 20

_log = logging.getLogger(__name__)


class HelperProcess:
    """The client end: used by one thread, that of vLLM's steps.

    Args:
        command: The helper's command line, given the number of its socket.
        cpus: The CPUs that it is to run on; asked at each start, none for all.
        environ: The helper's whole environment; None: this process's.
        most_unread_bytes: It is killed when it leaves more unread.
        most_answer_bytes: Longer than any answer.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        cpus: Callable[[], Collection[int]] = frozenset,
        most_unread_bytes: int = UNREAD_BYTES,
        most_answer_bytes: int = ANSWER_BYTES,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._command = command
        self._environ = environ
        self._cpus = cpus
        self._most_unread_bytes = most_unread_bytes
        self._most_answer_bytes = most_answer_bytes
        self._life: _Life | None = None
        self._misses = 0
        self._awaits = False
        # What the thread has started, until a step takes it over.
        self._fresh: _Life | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def awaits(self) -> bool:
        """Whether the next steps are to be waited for, as the helper said last; drafters rest at the start."""
        return self._awaits

    @property
    def connected(self) -> bool:
        """Whether there is a helper, as far as is known."""
        return self._life is not None

    @property
    def room_bytes(self) -> int:
        """How much may be sent that need not be: half of what may lie unread."""
        return self._most_unread_bytes // 2 - self._life.stream.unsent_bytes if self._life else 0

    def start(self) -> None:
        """Has the helper started, if nobody did so yet."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._supervise, name="paceline-helper", daemon=True)
            self._thread.start()

    def renewed(self) -> bool:
        """Takes over a helper that was started since the last call; true if there is one: it knows nothing."""
        # No lock is taken at an ordinary step.
        if self._fresh is None or (fresh := self._taken_over()) is None:
            return False
        if self._life is not None:
            self._life.stream.close()
        self._life, self._misses, self._awaits = fresh, 0, False
        return True

    def exchange(self, message: StepMessage, deadline_s: float) -> ChainsMessage | None:
        """Sends a step, and waits for its answer if it is awaited.

        Args:
            message: The step.
            deadline_s: Monotonic seconds; nothing here lasts longer.

        Returns:
            Its answer; None if there was none in time, if nobody waits, or if the helper is lost.
        """
        if self._life is None:
            return None
        try:
            self._life.stream.send(step_bytes(message))
            if message.awaited:
                return self._awaited(self._life.stream, message.step, deadline_s)
            self._read(self._life.stream, message.step)
        except (BrokenMessageError, HelperLostError, OSError) as error:
            self.abandon(str(error))
        return None

    def abandon(self, reason: str) -> None:
        """Kills the helper; another one starts after a pause."""
        life, self._life, self._awaits = self._life, None, False
        if life is not None:
            life.given_up = reason
            life.stream.close()
            life.process.kill()

    def close(self) -> None:
        """Ends the helper for good, by force if it does not end by itself within 1 s."""
        self._ended.set()
        if self._thread is None:
            return
        self.renewed()
        process = None
        if self._life is not None:
            self._life.stream.close()
            process, self._life = self._life.process, None
        self._thread.join(END_S)
        if process is not None and self._thread.is_alive():
            process.kill()
        self._thread.join(END_S)

    def _taken_over(self) -> _Life | None:
        with self._lock:
            fresh, self._fresh = self._fresh, None
        return fresh

    def _awaited(self, stream: HelperSocket, step: int, deadline_s: float) -> ChainsMessage | None:
        while True:
            answer = self._read(stream, step)
            if answer is not None:
                self._misses = 0
                return answer
            if not stream.wait(deadline_s):
                break
            stream.flush()
        self._misses += 1
        if self._misses >= MOST_MISSES:
            raise HelperLostError(f"it answered none of {self._misses} steps in time")
        return None

    def _read(self, stream: HelperSocket, step: int) -> ChainsMessage | None:
        """The answer to a step, if it has come; heeds all that came, whatever step it is for."""
        found = None
        for answer in stream.received():
            self._awaits = answer.awaits
            if answer.step == step:
                found = answer
        return found

    def _supervise(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._ended.is_set():
            started_s = time.monotonic()
            outcome = self._live()
            if self._ended.is_set():
                return
            if time.monotonic() - started_s >= SETTLED_S:
                pause_s = FIRST_PAUSE_S
            # One that never lives is told of a few times, not for ever.
            if pause_s < LAST_PAUSE_S:
                _log.warning("the helper process %s; another one starts in %.1f s", outcome, pause_s)
            self._ended.wait(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _live(self) -> str:
        """Starts a helper and waits until it has ended; says how."""
        try:
            life = self._started()
        except OSError as error:
            return f"could not start ({error})"
        with self._lock:
            self._fresh = life
        if self._ended.is_set():
            life.process.kill()
        status = life.process.wait()
        with self._lock:
            if self._fresh is life:
                self._fresh = None
                life.stream.close()
        return f"was given up: {life.given_up}" if life.given_up else f"ended with status {status}"

    def _started(self) -> _Life:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    self._command(theirs.fileno()),
                    env=self._environ,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,
                )
            except OSError:
                ours.close()
                raise
        try:
            if cpus := self._cpus():
                os.sched_setaffinity(process.pid, cpus)
        except OSError as error:
            _log.warning("the CPUs of the helper process cannot be chosen, it runs on all: %s", error)
        return _Life(process, HelperSocket(ours, self._most_unread_bytes, self._most_answer_bytes))


class _Life:
    """One helper process, and our end of its socket."""

    __slots__ = ("given_up", "process", "stream")

    def __init__(self, process: subprocess.Popen[bytes], stream: HelperSocket) -> None:
        self.process = process
        self.stream = stream
        # Why it was killed.
        self.given_up = ""
