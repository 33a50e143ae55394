"""`python -m paceline.cluster PID COMMAND`: runs a command that cannot outlive the supervisor that asked for it.

It has the kernel kill this process when its parent dies, which `exec` keeps. It knows no service.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
EXIT_STATUS_NO_PROGRAM = 127


def main() -> None:
    """Takes the parent's process id and the command from the command line and becomes the command."""
    parent_pid, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        # The parent died before the request reached the kernel: nothing is left that would stop this process.
        raise SystemExit(1)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]}: {error.strerror}\n")
        raise SystemExit(EXIT_STATUS_NO_PROGRAM) from None


if __name__ == "__main__":
    main()
