"""How many files, and so connections, a process may have open at once."""

from __future__ import annotations

import logging
import resource
from contextlib import suppress

_log = logging.getLogger(__name__)


def raise_open_files_limit() -> None:
    """Raises the limit to the highest that the system allows this process.

    Shells and init systems often set 1,024, for old programs that cannot use more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Some systems refuse what they call the hard limit; then the old one stays.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if soft != hard:
            _log.info("limit of open files raised", extra={"before": soft, "now": hard})


def open_files_limit() -> int:
    """Returns the present limit."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
