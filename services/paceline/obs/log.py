"""Logging set-up: one line per event on stderr, `key=value`, through the standard library.

Callers write `log.info("session ended", extra={"session_id": ...})`. It knows no service.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
# They log every request at INFO; the caller logs failures.
HTTP_CLIENTS = ("httpx", "httpx2")
_NEEDS_QUOTES = frozenset(' "=\\')

# The recorded trace of the request that a task serves; all log lines of the task name it.
current_trace_id: ContextVar[str] = ContextVar("trace_id", default="")


def setup_logging(service: str, *, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Sends all logging of this process to `stream` (stderr) in one-line form; replaces earlier set-ups."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(KeyValueFormatter(service))
    root = logging.getLogger()
    for earlier in list(root.handlers):
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(level)
    for client in HTTP_CLIENTS:
        logging.getLogger(client).setLevel(logging.WARNING)


class KeyValueFormatter(logging.Formatter):
    """Formats a record as `ts=... level=... service=... msg="..." key=value ...` on one line."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of one record; a traceback becomes the value of `exception`."""
        pairs: list[tuple[str, Any]] = [
            ("ts", datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")),
            ("level", record.levelname.lower()),
            ("service", self._service),
            ("logger", record.name),
            ("msg", record.getMessage()),
        ]
        trace_id = current_trace_id.get()
        if trace_id:
            pairs.append(("trace_id", trace_id))
        pairs += [(key, value) for key, value in vars(record).items() if _is_extra(key)]
        if record.exc_info:
            pairs.append(("exception", self.formatException(record.exc_info)))
        return " ".join(f"{key}={_quoted(value)}" for key, value in pairs)


def _is_extra(key: str) -> bool:
    # Libraries such as Ray mark every record with attributes that begin with an underscore.
    return key not in _STANDARD_ATTRIBUTES and not key.startswith("_")


def _quoted(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if text and text.isprintable() and not _NEEDS_QUOTES & set(text):
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(_printable(character) for character in text) + '"'


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
