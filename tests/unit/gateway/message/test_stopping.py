"""A message that may hold one call ends with it, however its text is cut."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.gateway.message.form import (
    GEMMA4,
    GPT_OSS,
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    PYTHONIC,
    QWEN3_CODER,
    MessageForm,
)
from paceline.gateway.message.growing import Message

ONE = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CODER = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
CHANNEL = '<|channel|>commentary to=functions.f<|message|>{"a": "}"}'
# Forms of messages, calls, and how much of each is read until the first one has ended.
CALLS: list[tuple[dict[str, Any], str, str]] = [
    ({"tool_calls": HERMES}, '<tool_call>{"name": "f", "arguments": {"a": "}"}', f"}}</tool_call>{ONE}"),
    ({"tool_calls": HERMES}, '<tool_call>{"arguments": {"a": "}"}, "name": "f"}', f"</tool_call>{ONE}"),
    ({"tool_calls": MISTRAL}, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "}"}', '}, {"name": "g"'),
    ({"tool_calls": MISTRAL}, '[TOOL_CALLS]f{"a": "}"}', '[TOOL_CALLS]g{"a": 1}'),
    ({"tool_calls": LLAMA3_JSON}, '{"name": "f", "parameters": {"a": "}"}', '}; {"name": "g"'),
    ({"tool_calls": QWEN3_CODER}, CODER.replace("\n1\n", "\n}\n"), f"\n</tool_call>\n{CODER}"),
    ({"tool_calls": PYTHONIC}, '[f(a="}"), g()]', "[h()]"),
    ({"tool_calls": GEMMA4}, '<|tool_call>call:f{a:<|"|>}<|"|>}', "<tool_call|><|tool_call>call:g{}"),
    ({"reasoning": GPT_OSS}, CHANNEL, f"<|call|><|start|>assistant{CHANNEL}"),
    ({"enforced": True}, '[{"name": "f", "parameters": {"a": "}"}', '}, {"name": "g"'),
    ({"enforced": True, "named": "f"}, '{"a": "}"}', "\n\n"),
]


def message(form: MessageForm, text: str, size: int) -> tuple[Message, str]:
    """What a text becomes, and as much of it as is read."""
    made, read = Message(form, "session"), ""
    reader = form.reader()
    for at in range(0, len(text), size):
        read = text[: at + size]
        made.delta(made.take(reader.feed(text[at : at + size])))
        if reader.over:
            return made, read
    made.delta(made.take(reader.finish()))
    return made, read


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("after", ["", " and so", ONE, f" then {ONE}"])
def test_what_follows_the_first_call_is_dropped(size: int, after: str) -> None:
    """sglang #9696, vLLM PR #26233: `parallel_tool_calls: false` let two calls through."""
    made, _ = message(MessageForm(tool_calls=HERMES, parallel=False), f"So: {ONE}{after}", size)
    whole = made.whole()
    assert (whole["content"], len(whole["tool_calls"])) == ("So:", 1)
    assert whole["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(("form", "call", "after"), CALLS)
@pytest.mark.parametrize("size", [1, 1000])
def test_a_message_is_over_when_the_arguments_of_its_only_call_are(
    form: dict[str, Any], call: str, after: str, size: int
) -> None:
    """sglang #9696: otherwise a model goes on to write calls that nobody gets."""
    made, read = message(MessageForm(**form, parallel=False), call + after, size)
    assert read == (call if size == 1 else call + after)
    [only] = made.calls
    assert (only.name, "".join(only.arguments)) == ("f", '{"a": "}"}')


@pytest.mark.parametrize("size", [1, 1000])
def test_arguments_that_are_no_object_end_where_something_follows(size: int) -> None:
    """Nothing else tells their end."""
    call = '<tool_call>{"name": "f", "arguments": "none"}'
    made, read = message(MessageForm(tool_calls=HERMES, parallel=False), f"{call}</tool_call> and", size)
    assert ["".join(each.arguments) for each in made.calls] == ["none"]
    assert read.removeprefix(f"{call}</tool_call>") == (" a" if size == 1 else " and")


def test_several_calls_stay_where_they_are_wanted() -> None:
    """sglang #9696: the cut is for those who ask for it."""
    made, read = message(MessageForm(tool_calls=HERMES), ONE + ONE, 5)
    assert (len(made.calls), read) == (2, ONE + ONE)
