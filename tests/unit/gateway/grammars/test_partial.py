"""What follows reasoning is bound; the reasoning is free."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from paceline.gateway.grammars.formats import grammar_of_choices, grammar_of_json_schema
from paceline.gateway.grammars.partial import after_reasoning
from paceline.gateway.message.form import DEEPSEEK_R1, GPT_OSS, QWEN3
from tests.support.grammar_texts import opening, whole

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}

YES_OR_NO = grammar_of_choices(["yes", "no"])
AN_OBJECT = grammar_of_json_schema(SCHEMA)


@pytest.mark.parametrize(
    ("reasoning", "prompt_end", "text", "ends"),
    [
        (QWEN3, "assistant\n", "<think>\nhm, no\n</think>\n\nyes", True),
        (QWEN3, "assistant\n", "yes", True),
        (QWEN3, "assistant\n", "hm", None),
        (QWEN3, "assistant\n<think>\n", "yes", False),
        (QWEN3, "assistant\n<think>\n", "hm</think>", False),
        (QWEN3, "assistant\n<think>\n", "hm</think>hm", None),
        (QWEN3, "assistant\n<think>\n", "hm</think>\n\nno", True),
        (QWEN3, "<think>\n\n</think>\n\n", "no", True),
        (QWEN3, "<think>\n\n</think>\n\n", "<think>", None),
        (DEEPSEEK_R1, "assistant", "hm</think>no", True),
        (GPT_OSS, "assistant", "no", True),
    ],
)
def test_reasoning_comes_before_what_is_bound(
    tokenizer: Tokenizer, vocabulary: LLTokenizer, reasoning: str, prompt_end: str, text: str, ends: bool | None
) -> None:
    grammar = after_reasoning(YES_OR_NO, opening(tokenizer, reasoning, prompt_end), field="x")
    assert whole(tokenizer, vocabulary, grammar, text) is ends


def test_a_schema_binds_what_follows_reasoning(tokenizer: Tokenizer, vocabulary: LLTokenizer) -> None:
    grammar = after_reasoning(AN_OBJECT, opening(tokenizer, QWEN3, "<think>\n"), field="x")
    assert whole(tokenizer, vocabulary, grammar, 'a {"b": 1} </think>{"a": 1}') is True
    assert whole(tokenizer, vocabulary, grammar, '</think>{"b": 1}') is None
