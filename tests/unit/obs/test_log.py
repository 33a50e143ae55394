"""Log lines are one line each and can be split into keys and values."""

from __future__ import annotations

import contextvars
import io
import logging
import shlex
from collections.abc import Iterator

import pytest

from paceline.obs.log import current_trace_id, setup_logging


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    target = io.StringIO()
    setup_logging("verifier", stream=target)
    yield target
    root.handlers[:] = handlers
    root.setLevel(level)


def fields(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in shlex.split(line))


def test_lines_of_a_traced_request_name_its_trace_and_others_do_not(stream: io.StringIO) -> None:
    def serve(trace_id: str) -> None:
        current_trace_id.set(trace_id)
        logging.getLogger("x").info("served")

    contextvars.copy_context().run(serve, "abc")
    logging.getLogger("x").info("idle")
    served, idle = stream.getvalue().splitlines()
    assert fields(served)["trace_id"] == "abc"
    assert "trace_id" not in fields(idle)


def test_a_line_has_time_level_service_message_and_extras(stream: io.StringIO) -> None:
    logging.getLogger("paceline.x").info("session ended", extra={"session_id": "s1", "num_tokens": 3})
    (line,) = stream.getvalue().splitlines()
    parsed = fields(line)
    assert parsed.pop("ts").endswith("+00:00")
    assert parsed == {
        "level": "info",
        "service": "verifier",
        "logger": "paceline.x",
        "msg": "session ended",
        "session_id": "s1",
        "num_tokens": "3",
    }


def test_line_breaks_and_quotes_in_values_stay_on_the_line(stream: io.StringIO) -> None:
    logging.getLogger("paceline.x").warning('broken "text"\nnext=line')
    (line,) = stream.getvalue().splitlines()
    assert fields(line)["msg"] == 'broken "text"\\nnext=line'


def test_a_traceback_is_one_value(stream: io.StringIO) -> None:
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("paceline.x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: bad" in fields(line)["exception"]


def test_debug_lines_are_left_out_by_default(stream: io.StringIO) -> None:
    logging.getLogger("paceline.x").debug("detail")
    assert stream.getvalue() == ""
