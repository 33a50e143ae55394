"""Messages as agents replay them, and the one that a template refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.gateway.api.openai.prompts import plain_messages, refused_at
from paceline.gateway.http.fields import UnknownFields, read_result


def plain(*messages: Any) -> list[Any]:
    return plain_messages(messages, UnknownFields(strict=True))


def call(**fields: Any) -> Any:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f"}, **fields}]}


def test_results_without_ids_answer_calls_in_their_order() -> None:
    """vLLM #9019: ids that templates take, of nine letters and digits."""
    two = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, {"id": "x", "function": {"name": "g"}}]}
    told = plain(two, {"role": "tool"}, {"role": "tool"}, {"role": "tool", "content": "more"})
    assert [each["tool_call_id"] for each in told[1:]] == ["call00001", "x", "call00003"]
    assert [each["id"] for each in told[0]["tool_calls"]] == ["call00001", "x"]


def test_arguments_nested_beyond_the_parser_are_broken_ones() -> None:
    """vLLM PR #48922, with a text that ends the parser's recursion."""
    [message] = plain(call(function={"name": "f", "arguments": '{"a":' + "[" * 100_000}))
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_a_call_of_a_custom_tool_has_its_text_as_an_argument() -> None:
    """llama.cpp #20156: tools that are no functions, in the history."""
    custom = {"id": "x", "type": "custom", "custom": {"name": "patch", "input": "+a"}}
    [message] = plain({"role": "assistant", "tool_calls": [custom]})
    assert message["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "+a"}}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, ""),
        ({"a": "ä"}, '{"a": "ä"}'),
        (7, "7"),
        (["a", {"stdout": "b"}, {"type": "text", "text": "c"}], 'a\n{"stdout": "b"}\nc'),
        ([{"type": "search_result", "source": "u", "content": [{"type": "text", "text": "d"}]}], "d"),
        ([{"type": "document", "source": {"type": "text", "data": "e"}}], "e"),
        ([{"type": "image", "source": {"type": "base64", "data": "AAAA"}}], "[image]"),
    ],
)
def test_whatever_a_tool_answers_becomes_text(given: Any, text: str) -> None:
    """llama.cpp #20156: outputs of tools that are no text."""
    assert read_result(given, UnknownFields(strict=False), "content") == text


ROLES = [
    (["user", "system"], 1, "move it to the beginning, or make it a user message"),
    (["user", "tool"], 1, "put the assistant's call before this result, or make it a user message"),
    (["user", "user"], 1, "join it with the user message before it"),
    (["user", "assistant"], 1, "leave this assistant message out, or change it"),
]


@pytest.mark.parametrize(("roles", "at", "advice"), ROLES)
def test_a_refusal_says_which_message_and_what_to_change(roles: list[str], at: int, advice: str) -> None:
    """ollama #17774: a refusal that named nothing."""
    messages = [{"role": "user"}, {"role": "assistant"}] * 4 + [{"role": role} for role in roles] + [{"role": "user"}]

    def refusal(begun: Sequence[Any]) -> str:
        return "no" if len(begun) > 8 + at else "something else"

    error = refused_at(messages, "no", refusal)
    assert (error.field, error.problem) == (f"messages[{8 + at}]", f"the chat template refuses it: no; {advice}")
