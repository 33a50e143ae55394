"""White space that Python knows and JSON does not."""

from __future__ import annotations

from paceline.gateway.message.tool_calls.hermes import HermesCalls
from paceline.gateway.message.tool_calls.json_call import CallBegin


def test_a_call_is_read_behind_white_space_that_json_does_not_know() -> None:
    reader = HermesCalls()
    parts = list(reader.feed('<tool_call>\u00a0{"arguments": {"a": 1}, "name": "f"}</tool_call>'))
    assert [part.name for part in parts if isinstance(part, CallBegin)] == ["f"]
