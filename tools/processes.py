"""Runs a command in a process group of its own, with a deadline; nothing it started outlives the call."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

TERM_GRACE_S = 5.0
MOST_ERROR_CHARS = 240


class CommandFailedError(Exception):
    """A command ended badly or not in time; the message is one line."""


def run_command(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str],
    quiet_s: float,
    stdin: str = "",
    on_line: Callable[[str], None] | None = None,
    cwd: Path | None = None,
) -> None:
    """Runs a command to its end, handing over each line of its stdout.

    Args:
        command: Program and arguments.
        env: The whole environment.
        quiet_s: Longest time to the next line or the end.
        stdin: Written to it at once.
        on_line: Called with each line, without its end.
        cwd: Where it runs.

    Raises:
        CommandFailedError: It cannot be started, is not in time, or its exit status is not 0.
    """
    name = Path(command[0]).name
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
        try:
            process = subprocess.Popen(
                [str(part) for part in command],
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise CommandFailedError(f"{name} does not start: {error.strerror}") from error
        try:
            _feed(process, stdin)
            _read_lines(process, name, quiet_s, on_line)
            status = process.wait(TERM_GRACE_S)
        except subprocess.TimeoutExpired:
            raise CommandFailedError(f"{name} closed its output but did not end") from None
        finally:
            _stop(process)
        if status != 0:
            stderr.seek(0)
            raise CommandFailedError(f"{name} ended with status {status}: {last_words(stderr.read())}")


def last_words(text: str) -> str:
    """The line that says most about a failure: the last one that names an error, or the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["it printed nothing"])[-1][:MOST_ERROR_CHARS]


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends what is left of the process group, politely first, and closes our ends of the pipes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_GRACE_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def _feed(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdin is not None, "the pipe was asked for"
    try:
        process.stdin.write(text)
        process.stdin.close()
    except BrokenPipeError:
        pass  # It ended before it read: the exit status says why.


def _read_lines(
    process: subprocess.Popen[str], name: str, quiet_s: float, on_line: Callable[[str], None] | None
) -> None:
    assert process.stdout is not None, "the pipe was asked for"
    # A thread, since a pipe has no deadline; it ends when the group, which holds the pipe, does.
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
    deadline_s = time.monotonic() + quiet_s
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            raise CommandFailedError(f"{name} was not done within {quiet_s:g} s") from None
        if line is None:
            return
        if on_line is not None:
            on_line(line.rstrip("\n"))
            deadline_s = time.monotonic() + quiet_s


def _pump(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    # Closing waits for a read under way; a line later than the deadline finds the file closed.
    with contextlib.suppress(ValueError, OSError):
        for line in stream:
            lines.put(line)
    lines.put(None)
