"""How this process was called, so that its messages name a command that can be typed again.

Needs nothing but the standard library.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

PROGRAM = "paceline"


def as_called(command: str) -> str:
    """Returns `paceline COMMAND` as whoever started this process would write it.

    `python -m paceline COMMAND` after that, `python -m paceline.COMMAND` where a service was started as a module, the
    path of the program where no search path leads to it, and `command` itself in any other program.
    """
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None:
        name = module.name.removesuffix(".__main__")
        if name == PROGRAM:
            return f"python -m {command}"
        if name == command.replace(" ", "."):
            return f"python -m {name}"
    program = Path(sys.argv[0])
    if program.name != PROGRAM or shutil.which(PROGRAM) == str(program.absolute()):
        return command
    return f"{sys.argv[0]}{command.removeprefix(PROGRAM)}"
