"""A message that may hold one call ends after it, however its text is cut."""

from __future__ import annotations

import pytest

from paceline.gateway.message.form import HERMES, MessageForm
from paceline.gateway.message.growing import Message

ONE = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def message(text: str, size: int, *, parallel: bool) -> Message:
    form = MessageForm(tool_calls=HERMES, parallel=parallel)
    made, reader = Message(form, "session"), form.reader()
    for at in range(0, len(text), size):
        made.delta(made.take(reader.feed(text[at : at + size])))
    made.delta(made.take(reader.finish()))
    return made


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("after", ["", " and so", ONE, f" then {ONE}"])
def test_what_follows_the_first_call_is_dropped(size: int, after: str) -> None:
    """sglang #9696, vLLM PR #26233: `parallel_tool_calls: false` let two calls through."""
    made = message(f"So: {ONE}{after}", size, parallel=False)
    whole = made.whole()
    assert (whole["content"], len(whole["tool_calls"])) == ("So:", 1)
    assert whole["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert made.over == bool(after)


def test_several_calls_stay_where_they_are_wanted() -> None:
    """sglang #9696: the cut is for those who ask for it."""
    made = message(ONE + ONE, 5, parallel=True)
    assert (len(made.calls), made.over) == (2, False)
