"""The folder for what can be made again: compiled kernels, what was learned, widened checkpoints.

Files there are trusted, and kernels run as found: no folder is used in which others may write.
"""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

logger = logging.getLogger(__name__)

NAME = "paceline"
PRIVATE = 0o700


class NothingWritableError(Exception):
    """No folder can be written; the message names the variables that name another."""


def user_cache(environ: Mapping[str, str]) -> Path:
    """Returns paceline's folder in the user's cache, or a temporary one where that cannot be written; makes none.

    Args:
        environ: Environment variables; XDG_CACHE_HOME says where caches are.

    Raises:
        NothingWritableError: Nothing can be written.
    """
    wanted = _wanted(environ)
    return writable(wanted, "XDG_CACHE_HOME") if wanted is not None else _temporary("no home folder is known")


def writable(folder: Path, variable: str) -> Path:
    """Returns the folder, or a temporary one where it cannot be written, or others may write there.

    Args:
        folder: It need not exist.
        variable: Environment variable, which can name another; for the log.

    Raises:
        NothingWritableError: Nothing can be written.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        return _temporary(f"{folder} cannot be written", variable)
    if there == folder and not is_private(folder.stat()):
        return _temporary(f"{folder} may be written by others", variable)
    return folder


def is_private(found: os.stat_result) -> bool:
    """Whether nobody else may write to a file or a folder: it is ours, or root's."""
    return found.st_uid in (os.getuid(), 0) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def make_private(folder: Path) -> None:
    """Makes a folder below one of paceline's, and that one, where others may not write, whatever the umask.

    Raises:
        OSError: It cannot be made.
    """
    folder.parent.parent.mkdir(parents=True, exist_ok=True)
    for each in (folder.parent, folder):
        each.mkdir(PRIVATE, exist_ok=True)


def _wanted(environ: Mapping[str, str]) -> Path | None:
    named = environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named) / NAME
    try:
        return Path.home() / ".cache" / NAME
    except RuntimeError:
        # The user has no entry, as in a container with a number for a user.
        return None


@functools.cache
def _temporary(reason: str, variable: str = "XDG_CACHE_HOME") -> Path:
    try:
        folder = _own_temporary()
    except OSError as error:
        raise NothingWritableError(
            f"{reason}, and neither can a temporary folder ({error.strerror or error}): set {variable} or TMPDIR to a "
            "folder that can"
        ) from error
    logger.warning("%s: %s is used instead; set %s to keep what is made once", reason, folder, variable)
    return folder


def _own_temporary() -> Path:
    """The same folder for all processes of a user, or one of this process's own if somebody else has made that."""
    folder = Path(tempfile.gettempdir()) / f"{NAME}-{os.getuid()}"
    # Anybody may have put a file or a link there.
    with suppress(FileExistsError):
        folder.mkdir(PRIVATE, exist_ok=True)
    found = folder.lstat()
    private = stat.S_ISDIR(found.st_mode) and is_private(found)
    return folder if private else Path(tempfile.mkdtemp(prefix=f"{NAME}-"))
